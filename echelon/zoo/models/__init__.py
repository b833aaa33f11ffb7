"""The zoo's models, one file a family. Importing a file adds its models to the registry."""
