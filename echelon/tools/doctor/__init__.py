"""``echelon doctor``: what every host, every rank and every link between them is like, as a job would meet them."""
