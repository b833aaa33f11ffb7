"""From text files to rows of tokens: what the data sets of text share."""
