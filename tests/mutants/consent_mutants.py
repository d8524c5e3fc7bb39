"""Deliberate bugs in the rules for what a recipe may import and to which servers keys may be sent."""

from mutant import Mutant

_CONSENT = "tests/config/test_consent.py"
_KEYS = "tests/config/test_keys.py"

CONSENT = (
    Mutant(
        "a recipe can name any class of Retouch",
        "config/section.py",
        "        consent.require(path, own=self._own)\n        try:",
        "        try:",
        f"{_CONSENT}::test_only_classes_of_retouch_with_a_kind_can_be_named_in_a_recipe_and_need_no_consent",
    ),
    Mutant(
        "an allowed module allows all modules whose names start with its name",
        "config/consent.py",
        'any(part in names for part in accumulate(module.split("."), "{}.{}".format))',
        "any(module.startswith(name) for name in names)",
        f"{_CONSENT}::test_allowing_a_package_allows_its_submodules_but_not_its_parents_and_invalid_names_are_rejected",
    ),
    Mutant(
        "a remembered consent holds for another file with the same module name",
        "config/consent.py",
        "known.get(name) is not None and known[name] == locate(name)",
        "known.get(name) is not None",
        f"{_CONSENT}::test_remembered_consent_does_not_apply_to_another_file",
    ),
    Mutant(
        "a package in the current folder counts as installed",
        "config/consent.py",
        "if Path(entry).resolve() != Path.cwd() and os.path.exists(entry)]",
        "if os.path.exists(entry)]",
        f"{_CONSENT}::test_a_package_in_the_current_folder_does_not_count_as_installed",
    ),
    Mutant(
        "a rank asks the user for consent",
        "config/consent.py",
        'not _command.get() or "RANK" in os.environ or not',
        "not _command.get() or not",
        f"{_CONSENT}::test_consent_is_not_asked_outside_of_a_command_or_on_a_rank",
    ),
    Mutant(
        "a class is instantiated before its members are checked",
        "config/imports.py",
        "for name in members if not any(name in own",
        "for name in members if not hasattr(wanted(**args), name) and not any(name in own",
        f"{_CONSENT}::test_a_class_that_is_no_reward_or_model_is_not_called",
    ),
    Mutant(
        "every class counts as defining __call__",
        "config/imports.py",
        "members if not any(name in own or",
        'members if name != "columns" and not hasattr(wanted, name) and not any(name in own or',
        f"{_CONSENT}::test_a_class_that_is_no_reward_or_model_is_not_called",
    ),
    Mutant(
        "the allowed imports of a command outlive it",
        "config/consent.py",
        "        os.environ.pop(VARIABLE, None)\n        if before",
        "        if before",
        f"{_CONSENT}::test_the_allow_import_flag_sets_the_environment_only_during_its_command",
    ),
    Mutant(
        "the address that a key is bound to is compared by its prefix",
        "config/keys.py",
        "return (self.scheme, self.host) == (other.scheme, other.host) and self.port in (None, other.port)",
        "return str(other).startswith(str(self))",
        f"{_KEYS}::test_the_key_of_a_provider_is_bound_to_its_address_which_a_binding_of_the_user_replaces",
    ),
    Mutant(
        "the port is ignored when bound addresses are compared",
        "config/keys.py",
        " and self.port in (None, other.port)",
        "",
        f"{_KEYS}::test_the_key_of_a_provider_is_bound_to_its_address_which_a_binding_of_the_user_replaces",
    ),
    Mutant(
        "a judge's API key is sent to any address in the recipe",
        "retouch_judge/chat_client.py",
        "            keys.require_bound(variable, url)\n",
        "            keys.address_of(url)\n",
        f"{_KEYS}::test_a_key_is_not_sent_to_a_judge_that_it_is_not_bound_to",
    ),
    Mutant(
        "the token is sent to any reward server",
        "retouch_serve/settings.py",
        "            keys.require_bound(variable, url)\n",
        "            keys.address_of(url)\n",
        f"{_KEYS}::test_reward_tokens_and_engine_keys_are_sent_only_to_this_machine_and_bound_addresses",
    ),
    Mutant(
        "the user's binding is added to the provider's address instead of replacing it",
        "config/keys.py",
        "() if own else KNOWN.get(variable, ())",
        "KNOWN.get(variable, ())",
        f"{_KEYS}::test_the_key_of_a_provider_is_bound_to_its_address_which_a_binding_of_the_user_replaces",
    ),
    Mutant(
        "a key can be bound to an http address of another machine",
        "config/keys.py",
        'address.scheme != "https" and variable not in OWN_SERVERS',
        "False",
        f"{_KEYS}::test_insecure_or_invalid_bindings_are_rejected",
    ),
)
