"""The proof of a whole fleet: processes killed under load, and which promises held. `python -m loadtest.proof`;
docs/proof.md."""
