"""What a rehearsal counts: memory by holder, FLOPs, kernels and host waits of each stage, and the rates of the GPUs.

It may import the fake accelerator (``retouch_plan.rehearsal.fake``), and nothing else of the rehearsal.
"""
