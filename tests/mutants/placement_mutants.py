"""Deliberate bugs in placement: weights that are sharded over ranks, modules that share weights, and the memory of a dry run."""

from mutant import Mutant

SHARDING = "tests/distributed/test_sharding.py"
PLACEMENT = "tests/distributed/test_placement.py"
MEMORY = "tests/plan/test_memory.py"
CHECKS = "tests/distributed/test_sharding.py"

PLACING = (
    Mutant(
        "FSDP averages gradients over ranks instead of summing them",
        "distributed/fsdp.py",
        "inner.set_gradient_divide_factor(1.0)",
        "inner.set_gradient_divide_factor(2.0)",
        f"{SHARDING}::test_sharded_steps_match_replicated_steps[fsdp2-full]",
    ),
    Mutant(
        "gradients of replicated weights are not summed over ranks",
        "distributed/fsdp.py",
        "flat = self.ranks.sum(torch.cat([gradient.flatten() for gradient in replicated]))",
        "flat = torch.cat([gradient.flatten() for gradient in replicated])",
        f"{SHARDING}::test_sharded_steps_match_replicated_steps[fsdp2-full]",
    ),
    Mutant(
        "sharded weights are not restored after a copy was swapped in",
        "distributed/fsdp.py",
        "shard.copy_(current[name])",
        "shard.add_(0.0)",
        f"{SHARDING}::test_sharded_steps_match_replicated_steps[fsdp2-full]",
    ),
    Mutant(
        "weights stay on the device although they should be offloaded to the CPU",
        "distributed/fsdp.py",
        "CPUOffloadPolicy(pin_memory=on_gpu) if weights_on_cpu else",
        "CPUOffloadPolicy(pin_memory=on_gpu) if False else",
        f"{SHARDING}::test_offloaded_fsdp_weights_are_pinned_and_synchronized_only_for_a_gpu",
    ),
    Mutant(
        "ZeRO-3 in accelerate's configuration is not rejected with its own reason",
        "distributed/ranks.py",
        'if stage == "3":',
        'if stage == "4":',
        f"{CHECKS}::test_unsupported_or_conflicting_launcher_settings_raise",
    ),
    Mutant(
        "a frozen encoder that shares the writer's weights encodes with the adapter",
        "retouch_models/qwen_image/responses.py",
        "published, published if frozen else nullcontext)",
        "published, nullcontext)",
        f"{PLACEMENT}::test_frozen_encoder_with_the_writers_weights_is_shared_only_with_lora",
    ),
    Mutant(
        "the editor's text encoder is a copy of the policy's module",
        "retouch_models/qwen_image/responses.py",
        "        editor.text.encoder = writer\n",
        "        editor.text.encoder = __import__('copy').deepcopy(writer)\n",
        f"{PLACEMENT}::test_shared_encoder_weights_use_one_storage",
    ),
    Mutant(
        "tensors that are freed on the fake device stay counted",
        "retouch_plan/meter.py",
        "            self._sizes[where] -= size",
        "            pass",
        f"{MEMORY}::test_freed_tensors_are_not_counted_and_views_are_not_counted_twice",
    ),
    Mutant(
        "the doctor leaves out the weights of reward models",
        "retouch_plan/dry_run.py",
        "size + rewards.get(each, 0)",
        "size",
        f"{MEMORY}::test_weights_of_reward_models_are_added_on_their_device",
    ),
    Mutant(
        "a step that needs the whole memory of a GPU fits",
        "retouch_plan/machines.py",
        "needed <= (1 - FREE_SHARE) * memory",
        "needed <= memory",
        f"{MEMORY}::test_a_step_fits_if_a_tenth_of_the_memory_stays_free",
    ),
    Mutant(
        "torch's cache is emptied although the recipe does not request it",
        "distributed/ranks.py",
        "devices.empty_cache_every or 0",
        "devices.empty_cache_every or 5",
        "tests/distributed/test_placement.py::test_cache_is_emptied_at_the_interval_of_the_recipe_and_never_by_default",
    ),
)
