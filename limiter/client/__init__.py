"""The client: what a service imports to ask Headgate, without anything of the store or the API."""
