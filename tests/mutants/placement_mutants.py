"""Deliberate bugs in placement: weights that are sharded over ranks, weights that are held once, and memory plans."""

from mutant import Mutant

SHARDING = "tests/distributed/test_sharding.py"
PLACEMENT = "tests/distributed/test_placement.py"
PLANS = "tests/memory/test_memory_plans.py"
DOCTOR = "tests/doctor/test_doctor_writing.py"
CHECKS = "tests/distributed/test_sharding_checks.py"

PLACING = (
    Mutant(
        "FSDP takes means of gradients that are shares of a sum",
        "distributed/fsdp.py",
        "inner.set_gradient_divide_factor(1.0)",
        "inner.set_gradient_divide_factor(2.0)",
        f"{SHARDING}::test_the_steps_are_those_of_ranks_that_share_nothing[fsdp2]",
    ),
    Mutant(
        "weights that are whole on every rank learn from their own rank alone",
        "distributed/fsdp.py",
        "flat = self.ranks.sum(torch.cat([gradient.flatten() for gradient in replicated]))",
        "flat = torch.cat([gradient.flatten() for gradient in replicated])",
        f"{SHARDING}::test_the_steps_are_those_of_ranks_that_share_nothing[fsdp2]",
    ),
    Mutant(
        "a copy of shared weights stays where it was swapped in",
        "distributed/sharded_copies.py",
        "shard.copy_(current[name])",
        "shard.add_(0.0)",
        f"{SHARDING}::test_copies_of_shared_weights_are_swapped_and_blended[fsdp2]",
    ),
    Mutant(
        "weights that should wait in CPU memory stay on the device",
        "distributed/fsdp.py",
        "CPUOffloadPolicy(pin_memory=on_gpu) if weights_on_cpu else",
        "CPUOffloadPolicy(pin_memory=on_gpu) if False else",
        f"{SHARDING}::test_weights_that_wait_are_page_locked_for_a_gpu_whose_copies_the_host_awaits",
    ),
    Mutant(
        "accelerate's ZeRO-3 is passed over",
        "distributed/placement.py",
        'if stage == "3":',
        'if stage == "4":',
        f"{CHECKS}::test_what_is_not_followed_is_refused",
    ),
    Mutant(
        "a frozen reader of the writer's own weights reads with what it has learnt",
        "models/qwen_image/encoder.py",
        "made = ResponseEncoder.without_adapter if frozen else",
        "made = ResponseEncoder.policy if frozen else",
        f"{PLACEMENT}::test_a_frozen_encoder_of_the_writers_own_weights_is_held_once",
    ),
    Mutant(
        "the policy's reader is held beside the policy",
        "models/qwen_image/encoder.py",
        "        editor.text.encoder = writer\n",
        "        editor.text.encoder = __import__('copy').deepcopy(writer)\n",
        f"{PLACEMENT}::test_what_is_held_once_has_one_storage",
    ),
    Mutant(
        "freed tensors are counted",
        "memory/peak.py",
        "if not entry[0].expired()",
        "if entry[0]",
        f"{PLANS}::test_freed_tensors_are_not_counted_and_views_are_not_counted_twice",
    ),
    Mutant(
        "without checkpoints one layer's activations are planned for all",
        "memory/tokens.py",
        "layers * kept + peak - kept if shared",
        "peak if shared",
        f"{PLANS}::test_the_planned_activations_of_a_layer_are_those_of_the_cpu[False]",
    ),
    Mutant(
        "the plan leaves out the models of rewards",
        "doctor/writer_memory.py",
        'parts.setdefault(device, []).append(("reward", MemoryPlan((row,))))',
        "pass",
        f"{DOCTOR}::test_system_c_has_a_plan_for_each_of_its_three_gpus",
    ),
    Mutant(
        "torch's cache is emptied unasked",
        "distributed/device_memory.py",
        "devices.empty_cache_every or 0",
        "devices.empty_cache_every or 5",
        "tests/distributed/test_device_memory.py::test_the_cache_is_given_back_when_the_recipe_says_so_and_not_else",
    ),
)
