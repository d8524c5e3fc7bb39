"""Makes vLLM start on a machine without a GPU. Python imports this file first, because ``vllm_server`` puts its folder on the path.
``make engines-sglang`` uses it too, only for torchvision.

vLLM's HTTP interface and its sampling distribution are not changed:

- torchvision from PyPI is linked against CUDA, so with a CPU build of torch its compiled operators are missing and its import
  fails. Two of these operators are declared here. vLLM uses neither of them: it only resizes images with torchvision.
- Model runner V2, which the plug-in for image tokens needs, is written in Triton, and there is no Triton compiler for CPUs on PyPI.
  With ``TRITON_INTERPRET=1`` Triton's interpreter runs the kernels. vLLM looks for a CPU backend before it uses Triton, so one is
  registered that is never active.
- The kernel of top-k and top-p does not run in the interpreter, whose loop counters are Python integers. vLLM's own fallback in
  torch is used instead.
"""

import os
import sys
import types
from importlib.abc import MetaPathFinder


class _BeforeImport(MetaPathFinder):
    """Calls an action before its module is imported for the first time, and finds nothing itself."""

    def find_spec(self, name, path=None, target=None):
        action = ACTIONS.pop(name, None)
        if action is not None:
            action()
        return None


def _declare_operators():
    global _library
    import torch

    _library = torch.library.Library("torchvision", "DEF")  # the declarations last as long as this object
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _register_backend():
    import triton.backends

    driver = type("CPUDriver", (), {"is_active": staticmethod(lambda: False)})
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)


def _use_fallback():
    import vllm.v1.sample.ops.topk_topp_sampler as sampler

    sampler.HAS_TRITON = False


ACTIONS = {"torchvision": _declare_operators}
if os.environ.get("TRITON_INTERPRET") == "1":
    ACTIONS |= {"vllm.triton_utils": _register_backend, "vllm.v1.worker.gpu.sample.sampler": _use_fallback}
sys.meta_path.insert(0, _BeforeImport())
