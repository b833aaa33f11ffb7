"""``echelon doctor``: checks every host, every rank and every link between them under the conditions of a job."""
