"""What there is to run on: clusters in words and files, devices by kind, and measuring the machine at hand."""
