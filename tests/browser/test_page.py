"""The real Prefect page in a real browser: a stage is opened, a value changed, and that is what runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from flows.runs.journal import latest
from tests.support.pipelines import data_config, full_config
from tests.support.programs.command import environment, finish, start, stemma, write_config
from tests.support.programs.processes import COLD, gone, progress_of, running_stage, wait_until
from tests.support.services.prefect_page import sheets

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_MS = 90_000
expect.set_options(timeout=PATIENCE_MS)
STAGES = ("ingest", "validate", "clean", "tokenizer")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]


@pytest.fixture(scope="module")
def deployed(built_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A finished data pipeline with its servers up and its stages deployed: (its folder, the Prefect page)."""
    folder = tmp_path_factory.mktemp("page") / "data"
    shutil.copytree(built_data, folder, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    config = write_config(folder / "config.yaml", data_config(folder))
    env = environment(STEMMA_RELAY="on", **COLD)
    root = folder / "store"
    try:
        services = stemma("up", "--root", root, env=env).document["services"]
        page = next(service["url"] for service in services if service["name"] == "prefect")
        answer = stemma("deploy", config, "--root", root, "--cron", "0 3 * * *", env=env)
        assert answer.code == 0, answer.document["errors"]
        names = {deployment["name"] for deployment in answer.document["deployments"]}
        assert names == {f"chronicle/{name}" for name in ("pipeline", "sweep", *STAGES)}
        yield folder, page
    finally:
        stemma("down", "--root", root, env=env)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def browser_page(browser: Browser) -> Iterator[Page]:
    """A page of a person who was not here before."""
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.set_default_timeout(PATIENCE_MS)
    yield page
    page.close()


def built_vocabularies(folder: Path) -> set[int]:
    manifests = (folder / "store" / "tokenizer").glob("*/manifest.json")
    return {json.loads(path.read_text())["config"]["vocab_size"] for path in manifests}


def open_form(page: Page, address: str, stage: str) -> None:
    """From the list of deployments to the stage's form, as a person would click."""
    page.goto(f"{address}/deployments")
    page.get_by_text(stage, exact=True).first.click()
    page.locator("button", has_text="Run").filter(has_not_text="Runs").first.click()
    page.get_by_text("Custom run").first.click()


def number(page: Page, title: str) -> Locator:
    """The field of a key in the form: the innermost of the groups that have its title."""
    return page.locator(".schema-form-property", has_text=title).last.locator("input[type=number]")


def submit(page: Page, address: str) -> str:
    """Submits the form and opens the page of the flow run that this started, whose id it returns."""
    with page.expect_response(lambda response: response.url.endswith("/create_flow_run")) as created:
        page.get_by_role("button", name="Submit").click()
    assert created.value.ok, created.value.text()
    flow_run = str(created.value.json()["id"])
    page.goto(f"{address}/runs/flow-run/{flow_run}")
    return flow_run


@pytest.mark.long
def test_a_changed_value_in_the_form_is_what_runs_and_what_hangs_on_it_is_offered(
    deployed: tuple[Path, str], browser_page: Page
) -> None:
    folder, address = deployed
    page = browser_page

    open_form(page, address, "clean")
    field = number(page, "Min Characters")
    expect(field).to_have_value("100")
    field.fill("440")
    flow_run = submit(page, address)

    # The page of a run draws its graph without a GPU all the time: it is opened when there is something to see.
    page.goto("about:blank")
    wait_until(lambda: "next" in sheets(address, flow_run))
    page.goto(f"{address}/runs/flow-run/{flow_run}")
    expect(page.get_by_text("Completed").first).to_be_visible()
    page.get_by_role("tab", name="Artifacts").or_(page.get_by_text("Artifacts")).first.click()
    expect(page.get_by_text("Stages of chronicle").first).to_be_visible()
    expect(page.get_by_text("After clean").first).to_be_visible()
    settings = [
        json.loads(path.read_text())["config"]["min_characters"]
        for path in (folder / "store" / "clean").glob("*/manifest.json")
    ]
    assert 440 in settings


@pytest.mark.long
def test_a_run_started_in_the_page_is_watched_cancelled_and_leaves_nothing_behind(
    deployed: tuple[Path, str], browser_page: Page
) -> None:
    """The risk: Cancel in Prefect's page ends a run otherwise than Cancel in ours, which is in `make test`."""
    folder, address = deployed
    root, page = folder / "store", browser_page
    open_form(page, address, "tokenizer")
    number(page, "Vocab Size").fill("444")
    flow_run = submit(page, address)
    child = wait_until(lambda: running_stage(root, "tokenizer"))
    assert isinstance(child, psutil.Process)
    # Held, so that it is still at work when a person has found the button.
    child.suspend()
    expect(page.get_by_text("Running").first).to_be_visible()
    page.get_by_role("button", name="Cancel").first.click()
    page.get_by_role("button", name="Confirm").click()
    child.resume()
    wait_until(lambda: gone(child), timeout_s=60)
    wait_until(lambda: page.request.get(f"{address}/api/flow_runs/{flow_run}").json()["state_type"] == "CANCELLED")
    expect(page.get_by_text("Cancelled").first).to_be_visible()
    page.goto("about:blank")
    assert 444 not in built_vocabularies(folder)
    again = stemma("run", folder / "config.yaml", "--root", root, env=environment(STEMMA_RELAY="on"))
    assert again.code == 0, again.document["errors"]


def test_the_page_of_a_run_shows_it_while_it_goes_cancels_and_retries_it(
    deployed: tuple[Path, str], browser_page: Page
) -> None:
    folder, address = deployed
    root, page = folder / "store", browser_page
    env = environment(STEMMA_RELAY="on")
    home = stemma("open", "page", "--print", "--root", root, env=env).document["url"]
    process = start("run", folder / "config.yaml", "--root", root, "--set", "tokenizer.vocab_size=333", env=env)
    child = wait_until(lambda: running_stage(root, "tokenizer"))
    assert isinstance(child, psutil.Process)
    child.suspend()  # held until a person has seen it and found the button
    page.goto(home)
    page.get_by_role("link", name="chronicle").first.click()
    expect(page.locator("h1 .state")).to_have_text("running")
    expect(page.locator('[data-step="tokenizer"].running')).to_be_visible()
    expect(page.locator('[data-step="clean"]')).to_have_class("step reused")
    page.set_viewport_size({"width": 375, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#answer")).to_have_text("requested; the steps will stop")
    child.resume()
    expect(page.locator("h1 .state")).to_have_text("cancelled")
    cancelled = finish(process)
    assert cancelled.document["status"] == "cancelled" and 333 not in built_vocabularies(folder)

    # Retry is pressed while the worker still judges the attempt that was cancelled.
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("h1 .state")).to_have_text("done")
    expect(page.locator('[data-step="tokenizer"]')).to_have_class("step built")
    assert 333 in built_vocabularies(folder)
    flow_run = f"{address}/api/flow_runs/{cancelled.document['flow_run_id']}"
    wait_until(lambda: page.request.get(flow_run).json()["state_type"] == "COMPLETED")

    page.get_by_role("link", name="Change a setting and run again").click()
    vocabulary = page.locator('[name="tokenizer.vocab_size"]')
    expect(vocabulary).to_have_value("333")
    vocabulary.fill("2")
    page.get_by_role("button", name="Run again").click()
    expect(page.locator('[id="error-tokenizer.vocab_size"]')).to_contain_text("greater than or equal")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    vocabulary.fill("355")
    page.get_by_role("button", name="Run again").click()
    expect(page.locator("h1 .state")).to_have_text("done")
    assert cancelled.document["run_id"] not in page.url and 355 in built_vocabularies(folder)


@pytest.mark.long
def test_retry_of_a_failed_run_continues_where_it_failed(deployed: tuple[Path, str], browser_page: Page) -> None:
    """A stage is killed once; the page's Retry builds it and reuses what was finished before."""
    folder, address = deployed
    env = environment(STEMMA_RELAY="on")
    root, config = folder / "store", folder / "config.yaml"
    process = start(
        "run", config, "--root", root, "--set", "clean.min_characters=77", "--set", "launch.retries=0", env=env
    )
    child = wait_until(lambda: running_stage(root, "clean"))
    assert isinstance(child, psutil.Process)
    child.kill()
    failed = finish(process)
    assert failed.statuses()["clean"] == "failed"
    flow_run = f"{address}/api/flow_runs/{failed.document['flow_run_id']}"
    run_folder = root / "runs" / failed.document["run_id"]
    page = browser_page
    home = stemma("open", "page", "--print", "--root", root, env=env).document["url"]
    page.goto(f"{home}/run/{run_folder.name}")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("h1 .state")).to_have_text("done")

    def state() -> str:
        return str(page.request.get(flow_run).json()["state_type"])

    wait_until(lambda: state() == "COMPLETED")
    assert page.request.get(flow_run).json()["run_count"] == 2
    result = json.loads((run_folder / "result.json").read_text())
    assert {row["stage"]: row["status"] for row in result["stages"]} == {
        "ingest": "reused",
        "validate": "reused",
        "clean": "built",
        "tokenizer": "reused",
    }


@pytest.mark.long
def test_reused_stages_show_as_cached(deployed: tuple[Path, str], browser_page: Page) -> None:
    """The risk: a run that reused all looks in the page like one that built all."""
    folder, address = deployed
    env = environment(STEMMA_RELAY="on")
    answer = stemma("run", folder / "config.yaml", "--root", folder / "store", env=env)
    assert answer.with_status("reused") == set(STAGES)
    assert "on the worker" in answer.stderr
    stages = sheets(address, answer.document["flow_run_id"])["stages"]
    links = dict(re.findall(r"^\| (\w+) \| \[reused\]\((\S+)\) \|", stages, re.MULTILINE))
    assert set(links) == set(answer.statuses())
    assert all("/runs/flow-run/" in link for link in links.values())
    artifacts = browser_page.request.post(f"{address}/api/artifacts/filter", data={"limit": 200}).json()
    kept = {item["key"] for item in artifacts if item["type"] == "progress"}
    assert not kept & {f"progress-{stage}" for stage in STAGES}, "what is full goes"
    # A run by hand leaves the schedule as it was, and so does deploying again.
    stemma("deploy", folder / "config.yaml", "--root", folder / "store", env=env)
    deployment = browser_page.request.get(f"{address}/api/deployments/name/chronicle/pipeline").json()
    assert [schedule["schedule"]["cron"] for schedule in deployment["schedules"]] == ["0 3 * * *"]

    browser_page.goto(f"{answer.document['flow_run_url']}?tab=Task%20Runs")
    expect(browser_page.get_by_text("Cached").first).to_be_visible()
    assert browser_page.get_by_text("Cached").count() >= 4


@pytest.mark.long
def test_the_sheet_of_a_failed_validation_links_its_page(deployed: tuple[Path, str], browser_page: Page) -> None:
    """The risk: from a red stage in the page there is no way to the rows that failed. That the stage writes them, and
    that failed runs have sheets, is in `make test`.
    """
    folder, address = deployed
    arguments = ["--root", folder / "store", "--set", "validate.documents.min_rows=1000000"]
    failed = stemma("run", folder / "config.yaml", *arguments, env=environment(STEMMA_RELAY="on"))
    assert failed.statuses()["validate"] == "failed"
    sheet = sheets(address, failed.document["flow_run_id"])["stage-validate"]
    links = dict(re.findall(r"^- \[(.+)\]\((.+)\)$", sheet, re.MULTILINE))
    assert set(links) == {"validation.html", "failing_rows.jsonl"}

    browser_page.goto(links["validation.html"])
    inside = browser_page.frame_locator("iframe")
    expect(inside.get_by_text("there are at least 1,000,000 documents").first).to_be_visible()


def _submit_sweep(page: Page, address: str, values: str) -> str:
    """The flow run of a sweep of the tokenizer's vocabulary, from the form."""

    def field(description: str) -> Locator:
        return page.locator(".schema-form-property", has_text=description).last.locator("textarea")

    open_form(page, address, "sweep")
    page.get_by_role("button", name="Add item").first.click()
    field("Dotted, such as").fill("tokenizer.vocab_size")
    field("A list such as").fill(values)
    field("STEP.FIGURE to compare").fill("tokenizer.bytes_per_token")
    return submit(page, address)


@pytest.mark.long
def test_a_sweep_is_started_in_the_page(deployed: tuple[Path, str], browser_page: Page) -> None:
    """Risk: a sweep that a person fills into the form is not the one that the worker runs, or hides how it ended."""
    folder, address = deployed
    page = browser_page
    flow_run = _submit_sweep(page, address, "310, 330")

    page.goto("about:blank")
    wait_until(lambda: "sweep" in sheets(address, flow_run), timeout_s=300)
    sheet = sheets(address, flow_run)["sweep"]
    assert "vocab_size=310" in sheet and "vocab_size=330" in sheet
    assert {310, 330} <= built_vocabularies(folder)
    trials = set(re.findall(r"\[done\]\(\S+/runs/flow-run/(\S+)\)", sheet))
    assert len(trials) == 2 and flow_run not in trials, "each trial is a run with a page of its own"
    wait_until(lambda: page.request.get(f"{address}/api/flow_runs/{flow_run}").json()["state_type"] == "COMPLETED")
    page.goto(f"{address}/runs/flow-run/{flow_run}")
    page.get_by_role("tab", name="Artifacts").or_(page.get_by_text("Artifacts")).first.click()
    expect(page.get_by_text("Sweep by tokenizer.bytes_per_token").first).to_be_visible()


@pytest.mark.long
def test_a_sweep_cancelled_in_the_page_ends_its_trial_and_goes_on_with_retry(
    deployed: tuple[Path, str], browser_page: Page
) -> None:
    """Risk: Cancel stops the sweep and leaves its trial at work, or Retry begins again with what had ended."""
    folder, address = deployed
    root, page = folder / "store", browser_page
    flow_run = _submit_sweep(page, address, "350, 370")

    def state() -> str:
        return str(page.request.get(f"{address}/api/flow_runs/{flow_run}").json()["state_type"])

    page.goto("about:blank")
    wait_until(lambda: 350 in built_vocabularies(folder), timeout_s=300)
    second = wait_until(lambda: running_stage(root, "tokenizer"), timeout_s=120)
    assert isinstance(second, psutil.Process)
    # Held, so that it is still at work when a person has found the button.
    second.suspend()
    page.goto(f"{address}/runs/flow-run/{flow_run}")
    page.get_by_role("button", name="Cancel").first.click()
    page.get_by_role("button", name="Confirm").click()
    wait_until(lambda: state() in ("CANCELLING", "CANCELLED"))
    second.resume()
    wait_until(lambda: gone(second), timeout_s=60)
    wait_until(lambda: state() == "CANCELLED", timeout_s=120)
    assert 370 not in built_vocabularies(folder)
    ended = page.request.post(f"{address}/api/flow_runs/filter", data={"limit": 50}).json()
    assert not [run["name"] for run in ended if run["state_type"] in ("RUNNING", "PENDING", "CANCELLING")]

    page.reload()
    page.get_by_role("button", name="Retry").first.click()
    page.get_by_role("button", name="Retry").last.click()
    wait_until(lambda: state() == "COMPLETED", timeout_s=300)
    sheet = sheets(address, flow_run)["sweep"]
    assert len(re.findall(r"\[done\]\(\S+/runs/flow-run/\S+\)", sheet)) == 2, sheet
    assert 370 in built_vocabularies(folder)


@pytest.mark.long
def test_cancel_in_the_page_ends_every_rank_within_ten_seconds(
    built_full: Path, tmp_path: Path, browser_page: Page
) -> None:
    """The risk: a rank that only the page's Cancel leaves alive. Ctrl-C at two ranks, and Cancel at a stage of one
    process, are in `make test`."""
    root, page = tmp_path / "store", browser_page
    shutil.copytree(built_full / "store", root, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    settings = full_config() | {"launch": {"processes": 2, "device": "cpu", "threads": 1, "compile": "off"}}
    never = {"checkpoint_every": "90000 batches", "evaluate_every": "90000 batches"}
    settings["pretrain"] |= {"duration": "90000 batches", **never, "guard": {"enabled": False}}
    config = write_config(tmp_path / "config.yaml", settings)
    env = environment()
    try:
        services = stemma("up", "--root", root, env=env).document["services"]
        address = next(service["url"] for service in services if service["name"] == "prefect")
        command = start("run", config, "--root", root, "--until", "pretrain", env=env)
        launcher = wait_until(lambda: running_stage(root, "pretrain"), timeout_s=240)
        assert isinstance(launcher, psutil.Process)
        wait_until(lambda: progress_of(root, "pretrain") >= 3, timeout_s=240)
        everyone = [launcher, *launcher.children(recursive=True)]
        assert len(everyone) >= 3
        flow_run = next(latest(root / "runs", "tiny")).start_record()["flow_run_id"]
        page.goto(f"{address}/runs/flow-run/{flow_run}")
        page.get_by_role("button", name="Cancel").first.click()
        page.get_by_role("button", name="Confirm").click()
        wait_until(lambda: all(map(gone, everyone)), timeout_s=60)
        assert finish(command, timeout_s=120).code == 130
        expect(page.get_by_text("Cancelled").first).to_be_visible()
    finally:
        stemma("down", "--root", root, env=env)
