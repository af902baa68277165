"""The page of a store: its runs while they go and when they have ended, its models, its servers.

It keeps no state: it reads journals and manifests, so it works for a finished store without servers. Public:
`server.serve`, and `run_view.RunView` for one run.
"""
