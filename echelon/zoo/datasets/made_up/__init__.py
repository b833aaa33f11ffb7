"""Made-up data for every task, so that everything runs with nothing downloaded. What is in it can be learned."""
