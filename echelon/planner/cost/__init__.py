"""The cost model: predicts seconds and bytes of a step from a model's units, a Cluster and a Draft."""
