"""Formats to deploy in: programs of torch.export for any number of tokens, traces, ONNX; torch.fx refuses."""

import io

import pytest
import torch

from attractor import APN, GPT, APNConfig, GPTConfig, retrofit

SMALL = APNConfig(num_patches=8, top_k=2, rank=4)
ANY = torch.export.Dim.DYNAMIC
LAYERS = {
    "basins": {"radius": 0.1, "whiten": True},
    "contextual": {"prototypes": "contextual", "layer_norm": True},
    "product": {"prototypes": "product", "num_patches": 9, "sparse_gradients": True},
    "shared": {"decoder": "shared", "gate": "scalar"},
}


class Logits(torch.nn.Module):
    """Of a model of transformers, which returns more than a tensor."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, tokens):
        return self.net(input_ids=tokens, use_cache=False).logits


def layer(**options):
    torch.manual_seed(0)
    shape = {"num_patches": 8, "top_k": 2, "rank": 4} | options
    return APN(16, **shape).eval(), torch.randn(2, 5, 16), torch.randn(3, 11, 16)


def gpt(**options):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "context": 16, "num_layers": 1, "num_heads": 2, "dim": 16, "ffn": "apn"}
    return GPT(GPTConfig(**shape | {"apn": SMALL} | options)).eval(), *tokens()


def retrofitted():
    from families import teach, tiny

    net = teach(retrofit(tiny("gpt2", num_hidden_layers=1), SMALL)).eval()
    return Logits(net).eval(), *tokens()


def tokens():
    return torch.randint(64, (2, 5)), torch.randint(64, (3, 11))


OTHERS = [
    pytest.param(lambda o=options: layer(**o), id=name, marks=pytest.mark.slow)
    for name, options in LAYERS.items()
]


@pytest.mark.parametrize("make", [layer, gpt, retrofitted, *OTHERS])
@torch.no_grad()
def test_export_takes_any_number_of_tokens_and_needs_nothing_of_ours(make):
    model, given, other = make()
    program = torch.export.export(model, (given,), dynamic_shapes=({0: ANY, 1: ANY},))
    assert not [
        node for node in program.graph.nodes if "attractor" in str(node.target) and node.op != "get_attr"
    ]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    for x in (given, other):
        torch.testing.assert_close(again(x), model(x))


@pytest.mark.filterwarnings(
    "ignore"
)  # it is deprecated, and warns of each number that it takes for a constant
@pytest.mark.parametrize("make", [layer, gpt, retrofitted])
@torch.no_grad()
def test_a_trace_takes_any_number_of_tokens(make):
    model, given, other = make()
    traced = torch.jit.trace(model, (given,), check_trace=False)
    for x in (given, other):
        torch.testing.assert_close(traced(x), model(x))


def test_fx_refuses_and_takes_the_layer_as_a_leaf():
    for model in (layer()[0], gpt()[0]):
        with pytest.raises(ValueError, match=r"symbolic_trace cannot follow this.*torch\.export can"):
            torch.fx.symbolic_trace(model)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, APN) or super().is_leaf_module(module, name)

    block = torch.nn.Sequential(torch.nn.LayerNorm(16), layer()[0])
    traced = torch.fx.GraphModule(block, Tracer().trace(block))
    x = torch.randn(3, 16)
    assert torch.equal(traced(x), block(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [layer, gpt, retrofitted, *OTHERS])
def test_onnx_predicts_the_same(make, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed, and no extra of ours has it")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model, given, other = make()
    with torch.no_grad():
        program = torch.onnx.export(
            model, (given,), dynamo=True, dynamic_shapes=({0: ANY, 1: ANY},), verbose=False
        )
        program.save(tmp_path / "model.onnx")
        session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        (name,) = (one.name for one in session.get_inputs())
        for x in (given, other):
            (found,) = session.run(None, {name: x.numpy()})
            torch.testing.assert_close(torch.from_numpy(found), model(x), atol=1e-5, rtol=1e-4)
