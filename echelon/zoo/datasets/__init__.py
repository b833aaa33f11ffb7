"""The zoo's data sets, one file a kind. Importing a file adds them to the registry."""
