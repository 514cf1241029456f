"""A GGUF file turned into a folder as Transformers writes it: float32 safetensors, configuration and tokenizer."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

import torch

from attnmesh.integrations.causal import check_causal
from attnmesh.integrations.problem import explained, needed
from attnmesh.integrations.quiet import quiet


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model and tokenizer into `folder`.

    What is wrong with the file is a ModelError; whatever else is raised came from writing.
    """
    transformers = needed("transformers")
    needed("gguf"), needed("accelerate")
    # The full name, since Transformers prefers a file of that name in the working directory to the one in the folder.
    where = {"gguf_file": str(gguf.absolute()), "local_files_only": True}
    # One bar of the GGUF reader is tqdm's own, which no setting of Transformers reaches.
    with quiet(), redirect_stderr(io.StringIO()):
        with explained(f"{gguf} cannot be converted"):
            config = transformers.AutoConfig.from_pretrained(gguf.parent, **where)
            check_causal(config, gguf)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                config=config,  # spares it a pass over the file
                dtype=torch.float32,
                # Otherwise some families stay quantized, through a kernel from the network; and none could be saved.
                quantization_config=transformers.GgufConfig(dequantize=True),
                **where,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, config=config, **where)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    # safetensors lets only its owner read the file it writes, but a cache may be shared: all files like the others.
    for file in folder.iterdir():
        file.chmod((folder / "config.json").stat().st_mode)
