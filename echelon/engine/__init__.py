"""The engine: builds a rank's part of the model, trains it, and saves, resumes and ends the run."""
