"""Deliberate bugs in the rules for what a recipe may import and to which servers keys may be sent."""

from mutant import Mutant

_CONSENT = "tests/config/test_consent.py"
_KEYS = "tests/config/test_keys.py"

CONSENT = (
    Mutant(
        "a recipe can name any class of Retouch",
        "config/kinds.py",
        "        consent.require(path, own=self._own)\n        try:",
        "        try:",
        f"{_CONSENT}::test_of_retouch_only_classes_that_are_meant_for_recipes_can_be_named",
    ),
    Mutant(
        "an allowed module allows all whose names begin like it",
        "config/consent.py",
        'any(".".join(parts[:depth]) in self.modules for depth in range(1, len(parts) + 1))',
        "any(module.startswith(name) for name in self.modules)",
        f"{_CONSENT}::test_a_package_allows_its_modules_and_a_module_nothing_above_it",
    ),
    Mutant(
        "what is remembered holds for any file of that name",
        "config/consent.py",
        "known.get(name) is not None and known[name] == locate(name)",
        "known.get(name) is not None",
        f"{_CONSENT}::test_what_was_remembered_does_not_hold_for_another_file",
    ),
    Mutant(
        "a package in the current folder is installed",
        "config/consent.py",
        "if Path(entry).resolve() != here]",
        "if True]",
        f"{_CONSENT}::test_a_package_in_the_current_folder_is_not_an_installed_one",
    ),
    Mutant(
        "a rank asks",
        "config/consent.py",
        'not _command.get() or "RANK" in os.environ or not',
        "not _command.get() or not",
        f"{_CONSENT}::test_nobody_is_asked_outside_of_a_command_or_as_a_rank",
    ),
    Mutant(
        "a class is called before it is known what it is",
        "config/imports.py",
        "    missing = [name for name in members if not _defines(wanted, name)]\n",
        "    missing = [name for name in members if not hasattr(wanted(**args), name)]\n",
        f"{_CONSENT}::test_a_class_that_is_no_reward_is_not_called[stranger:Number]",
    ),
    Mutant(
        "every class can be called, so every class has a call",
        "config/imports.py",
        "return any(name in vars(base) or name in vars(base)",
        'return name == "columns" or hasattr(wanted, name) or any(name in vars(base) or name in vars(base)',
        f"{_CONSENT}::test_a_class_that_is_no_reward_is_not_called[stranger:Number]",
    ),
    Mutant(
        "consent outlives its command",
        "config/consent.py",
        "        os.environ.pop(VARIABLE, None)\n        if before",
        "        if before",
        f"{_CONSENT}::test_a_flag_holds_for_its_command_and_for_what_it_starts",
    ),
    Mutant(
        "an address is bound by how it begins",
        "config/keys.py",
        "return (self.scheme, self.host) == (other.scheme, other.host) and self.port in (None, other.port)",
        "return str(other).startswith(str(self))",
        f"{_KEYS}::test_an_address_is_compared_as_a_whole",
    ),
    Mutant(
        "the port of an address does not matter",
        "config/keys.py",
        " and self.port in (None, other.port)",
        "",
        f"{_KEYS}::test_an_address_is_compared_as_a_whole",
    ),
    Mutant(
        "a judge's key goes wherever the recipe says",
        "rewards/vlm/chat_client.py",
        "            keys.require_bound(variable, url)\n",
        "            keys.address_of(url)\n",
        f"{_KEYS}::test_a_judge_that_the_key_is_not_bound_to_is_not_asked",
    ),
    Mutant(
        "the token goes to any reward server",
        "rewards/client/settings.py",
        "            keys.require_bound(variable, url)\n",
        "            keys.address_of(url)\n",
        f"{_KEYS}::test_the_token_of_reward_servers_goes_to_this_machine_and_where_it_is_bound",
    ),
    Mutant(
        "the user's binding adds to the provider's address",
        "config/keys.py",
        "() if own else KNOWN.get(variable, ())",
        "KNOWN.get(variable, ())",
        f"{_KEYS}::test_what_the_user_binds_replaces_the_providers_address",
    ),
    Mutant(
        "a key may be bound to plain http",
        "config/keys.py",
        'address.scheme != "https" and variable not in OWN_SERVERS',
        "False",
        f"{_KEYS}::test_a_binding_that_would_not_keep_the_key_is_refused",
    ),
)
