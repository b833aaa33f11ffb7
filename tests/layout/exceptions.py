"""Imports that point up and are not followed when a module is loaded: (module, package it imports), and why."""

UPWARD = {
    ("api.distribute", "tools"): "a script under 'echelon verify', 'plan' or 'memory' is handed to that tool",
    ("distributed.world", "parameter_server"): "init() in the role of a server becomes that server",
    ("nn", "parallel"): "nn.gather_batch is a public name",
    ("nn", "parameter_server"): "nn.SparseEmbedding is a public name",
    ("nn", "strategy"): "nn.ShowClickScore is a public name",
    ("observability.trace.rank_header", "planner"): "the peak FLOP/s of a GPU, from the planner's catalogue",
    ("plan.build", "parallel"): "which modules can be split is known where they are",
    ("plan.saved_bytes", "parallel"): "recomputed modules are counted as they will run",
    ("strategy.annotations.annotate", "planner"): "annotate(model, 'tensor') is a public function",
    ("strategy.strategy", "tools"): "strategy.explain() is a public method",
    ("tools.plan_report.model_source", "zoo"): "plans of zoo models take their sample batches",
    ("zoo.train.resolve", "cli"): "options of 'echelon run' are told from parameters of 'echelon train'",
}
