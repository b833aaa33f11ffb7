"""The sections of the page: each turns the records of a run into text, tables and figures."""
