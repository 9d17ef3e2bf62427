"""How memory is planned, as options say it."""
