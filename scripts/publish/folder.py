"""The files of a published network, and the figures on its card."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

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

CARD, TEMPLATE = "README.md", Path(__file__).with_name("card.md.jinja")


def publish(config: PublishConfig) -> Path:
    """Write the folder whole or not at all, and return its path.

    Raises ConfigError if the folder exists, and the errors of an unreadable checkpoint.
    """
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
    """The model card."""
    model, names = model_from_checkpoint(dict(state))
    saved, name = state["config"], config.name or Path(config.out).name
    figures, per_class = figures_of(state, run)
    network = Path(str(state["network"]["source"])).stem
    data = saved["data"]["name"] if "data" in saved else UNKNOWN
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.keep_trailing_newline = True
    environment.filters["cell"] = lambda text: " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    size = saved["evaluate"]["image_size"] or saved["train"]["image_size"]
    resize = saved["evaluate"].get("resize", "letterbox")
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=name, network=network, names=names, data=data, figures=figures, per_class=per_class, plugins=plugins,
        width=state["network"]["width"], parameters=count_parameters(model), size=size, resize=resize, proof=proof,
        counts=state.get("data"), epoch=state["epoch"], seen=images_seen(state), version=own_version(),
        license=config.license or UNKNOWN, data_license=config.data_license or UNKNOWN,
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
