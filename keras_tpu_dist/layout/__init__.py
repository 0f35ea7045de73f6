"""Which mesh axes split which dimension of a variable: rules, annotations, plans, reports.

`layouts.Layouts` answers for a strategy. `placement.place` decides about all variables of a model,
in one order: what the variable was given, annotations on layers (`annotations`), rules by path
(`rules.LayoutRules`), the plan (`planner`: "fsdp", "tensor_parallel", "auto"), then the logical
device of its layer. A variable without any of these is replicated. Tensor parallelism
(`tensor.TensorPlan`) pairs kernels by data flow: `flow.flow_of` traces a layer's call, and
`programs.cuts` finds what opens and closes a split; `banks` knows kernels of several experts, and
`programs.fused` those of queries, keys and values in one. `use` is for weights that are used in
another layout than they are stored in. `activations` has layouts of layer outputs.

`explain`, `lint` and `picture` say what was decided, what is probably a mistake, and draw it.
"""
