"""The proof of a whole fleet: processes killed under load, and what held. `python -m loadtest.proof`; docs/proof.md."""
