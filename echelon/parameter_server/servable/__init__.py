"""Servables: a trained model's dense part and rows in a directory that answers without a training job."""
