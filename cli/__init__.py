"""The `stemma` command: `main` starts it, `commands` names each command and its module, imported when it is called."""
