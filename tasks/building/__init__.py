"""The build of an artifact: reused or built under a lease, explained, committed, recorded in lineage.

Public: `build.build`, `context.BuildContext`, `explain`.
"""
