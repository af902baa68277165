"""stemma verify ARTIFACT: hash every byte of an artifact, or of all its ancestors too."""

from __future__ import annotations

from typing import Any

import click

from cli.common.completion import artifacts
from cli.common.options import root_of, root_option
from cli.common.output import as_json, print_problems


@click.command("verify")
@click.argument("artifact", shell_complete=artifacts)
@click.option("--ancestry", is_flag=True, help="Also verify all ancestors.")
@root_option
@as_json
def command(artifact: str, ancestry: bool, root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Hash every byte of ARTIFACT and report every file that differs from its manifest, is missing or is not listed.

    ARTIFACT is a folder, STAGE/FINGERPRINT or a unique prefix of it, or STAGE for its newest artifact.
    """
    from infra.errors import Problem
    from infra.store.ancestry import LineageGraph, artifact_member, missing
    from infra.store.ancestry import ancestry as ancestry_of
    from infra.store.reference import resolve
    from infra.store.store import Store

    store = Store(root_of(root), reading=True)
    start = resolve(store, artifact)
    graph = ancestry_of(store, [start]) if ancestry else LineageGraph()
    graph.add(artifact_member(store, *start))
    rows: list[dict[str, Any]] = []
    problems: list[Problem] = []
    for member in graph.artifacts:
        assert member.folder and member.manifest
        differences = store.verify(member.folder, member.manifest)
        remedy = f"stemma adopt {member.manifest.stage} FOLDER" if member.manifest.adopted else "stemma run CONFIG"
        problems += [Problem("difference", str(item.path), item.what, f"{remedy} restores it") for item in differences]
        rows.append(
            {
                "artifact": member.id,
                "files": len(member.manifest.files),
                "bytes": sum(file.size for file in member.manifest.files),
                "differences": [{"path": str(item.path), "what": item.what} for item in differences],
            }
        )
        if not as_json:
            message = f"{len(differences)} differ" if differences else "intact"
            click.echo(f"{member.id:<44} {rows[-1]['files']:>5} files {rows[-1]['bytes'] / 1e6:>10.1f} MB  {message}")
    for member, item in missing(store, graph):
        problems.append(Problem("difference", str(item.path), item.what, "stemma run CONFIG rebuilds it"))
        rows.append(
            {
                "artifact": member.id,
                "files": 0,
                "bytes": 0,
                "differences": [{"path": str(item.path), "what": item.what}],
            }
        )
        if not as_json:
            click.echo(f"{member.id:<44}     gone")
    if not as_json:
        print_problems(problems)
    status = "failed" if problems else "done"
    document = {"status": status, "errors": [problem.as_json() for problem in problems], "root": store.place}
    return {**document, "artifacts": rows}, 1 if problems else 0
