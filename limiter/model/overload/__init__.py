"""Overload control: expectations, response times, utilisation, shedding and retries."""
