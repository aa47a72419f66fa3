"""The files of a published network, and the figures on its card."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conf.answers.help import own_version
from conf.build.network import model_from_checkpoint
from conf.build.results import new_folder
from conf.extensions.parts import IN_USE
from conf.schema_tools import PublishConfig
from models import count_parameters
from train_utils.errors import TrainError
from train_utils.report.best import read_best
from train_utils.report.proof import FILE as PROOF
from train_utils.report.proof import UNKNOWN
from train_utils.run.checkpoint import load_checkpoint
from train_utils.run.checkpoint_files import FOLDER, find_checkpoint
from train_utils.run.hub_folder import CFG, write_hub_folder
from train_utils.run.run_state import images_seen
from train_utils.scores.coco_eval import ABSENT
from train_utils.shell import option

CARD = "README.md"
HUB_LICENSES = (  # the hub's names for licences; any other is "other", with a name of its own
    "afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bsd bsd-2-clause bsd-3-clause bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5"
    " cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0"
    " cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 gpl gpl-2.0 gpl-3.0 isc lgpl"
    " lgpl-2.1 lgpl-3.0 mit mpl-2.0 odbl openrail unlicense wtfpl zlib unknown"
).split()


def write(config: PublishConfig) -> Path:
    """Write the folder whole or not at all; print what it lacks and how to use it."""
    with new_folder(config.out) as folder:
        file, out = find_checkpoint(Path(config.ckpt), "best"), Path(config.out).absolute()
        state = load_checkpoint(file)
        run = file.parent.parent if file.parent.name == FOLDER else file.parent
        published = published_state(state)
        write_hub_folder(folder, published)
        if proof := (run / PROOF).is_file():
            shutil.copyfile(run / PROOF, folder / PROOF)
        text = card(config, state, run, proof, published["config"]["plugins"])
        (folder / CARD).write_text(text, encoding="utf-8")
    for key, of in (("license", "the weights"), ("data_license", "the data")):
        if getattr(config, key) is None:
            print(f"note: the card says that the licence of {of} is unknown; {key}=<its name> states it")
    if proof:
        print(f"note: {PROOF} names the host, command and folders of the run; remove it if they are nobody's business")
    repository = re.sub(r"[^\w.-]+", "-", out.name, flags=re.ASCII).strip("-.")  # as the hub allows
    upload = f"hf upload <user>/{repository or 'detector'} {shlex.quote(str(out))}"
    print(f"wrote {out}: look at its {CARD}, then upload it yourself:\n  {upload}")
    print(f"try it:\n  python predict.py {option('ckpt', out)} source=pictures")
    return out


def published_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What others need from a checkpoint, without the optimiser and without local paths."""
    saved = state["config"]
    size = saved["evaluate"]["image_size"] or saved["train"]["image_size"]
    kept = ("names", "category_ids", "weights_version", "epoch", "step", "ema")
    plugins = [plugin for plugin in IN_USE if any(part.kind in ("layer", "activation") for part in plugin.parts)]
    options = {part.name for plugin in plugins for part in plugin.parts}
    return {
        **{key: state[key] for key in kept if key in state},
        "seen": images_seen(state),
        "network": {**state["network"], "source": CFG},
        "config": {
            "model": {**saved["model"], "cfg": CFG, "weights": None},
            "evaluate": {"image_size": size},
            "plugins": [Path(plugin.given).name for plugin in plugins],
            "plugins_sha256": {plugin.name: plugin.sha256 for plugin in plugins},
            "plugin": {name: value for name, value in saved.get("plugin", {}).items() if name in options},
        },
    }


def card(config: PublishConfig, state: Mapping[str, Any], run: Path, proof: bool, plugins: list[str]) -> str:
    """The model card: front matter for the hub, then text for people."""
    model, names = model_from_checkpoint(dict(state))
    saved, name = state["config"], config.name or Path(config.out).name
    figures, per_class = figures_of(state, run)
    network = Path(str(state["network"]["source"])).stem
    data = saved["data"]["name"] if "data" in saved else UNKNOWN
    weights_license = config.license or UNKNOWN
    front: dict[str, Any] = {
        "license": weights_license.lower() if weights_license.lower() in HUB_LICENSES else "other",
        "library_name": own_version().split()[0],
        "pipeline_tag": "object-detection",
        "tags": ["object-detection", "yolo", "darknet", network],
    }
    if front["license"] == "other":
        front["license_name"] = weights_license
    if figures:
        task, of = {"type": "object-detection"}, {"name": data, "type": data}
        metrics = [{"type": key, "name": f"{key} (COCO)", "value": round(value, 4)} for key, value in figures.items()]
        front["model-index"] = [{"name": name, "results": [{"task": task, "dataset": of, "metrics": metrics}]}]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda text: " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    size = saved["evaluate"]["image_size"] or saved["train"]["image_size"]
    resize = saved["evaluate"].get("resize", "letterbox")
    return environment.get_template("card.md.jinja").render(
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True), name=name, network=network, names=names,
        width=state["network"]["width"], parameters=count_parameters(model), size=size, resize=resize, data=data,
        counts=state.get("data"), epoch=state["epoch"], seen=images_seen(state), figures=figures, per_class=per_class,
        license=weights_license, data_license=config.data_license or UNKNOWN, proof=proof, version=own_version(),
        plugins=plugins,
    )  # fmt: skip


def figures_of(state: Mapping[str, Any], run: Path) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The figures of these weights, and those of each class; empty where they are not known.

    The checkpoint holds the figures of the best epoch, and its run folder those of each class.
    """
    if not state.get("figures") or state.get("best_epoch") != state["epoch"]:
        return {}, {}
    figures = {key: value for key, value in state["figures"].items() if value != ABSENT}
    try:
        best = read_best(run).scores
    except TrainError:  # moved away from its run
        return figures, {}
    return figures, best.per_class if best.figures == state["figures"] else {}
