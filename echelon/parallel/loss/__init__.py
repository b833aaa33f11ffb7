"""Count of items that a loss averages over, and the weights that make the mean over ranks exact."""
