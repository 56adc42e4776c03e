"""The operators once more, by dense matrices in float64: F, T for the width, R, G for the depth, product by product.

Written from the table of rules, reading nothing of ``ds_vcycle``: which side of a parameter takes which matrix
is listed here by name. For one grouping, with m the size of a group:

    mean [coarse, fine] = 1/m     copy   [fine, coarse] = 1
    sum  [coarse, fine] = 1       divide [fine, coarse] = 1/m
"""

from __future__ import annotations

import re

import numpy as np

# Name -> (rows, columns); "+x" produces axis x, "-x" consumes it, "." is no width axis. First match counts.
LOSSLESS_RULES = (
    (r"embedding\.(word|position|tokentype)_embeddings\.weight", (".", "+hidden")),
    (r"(input_layernorm|pre_mlp_layernorm)\.(weight|bias)", ("+hidden",)),
    (r"(embedding\.layernorm|post_attention_layernorm|post_mlp_layernorm)\.(weight|bias)", ("+hidden",)),
    (r"encoder\.final_layernorm\.(weight|bias)", ("+hidden",)),
    (r"self_attention\.(q|k)_layernorm\.(weight|bias)", (".",)),
    (r"linear_qkv\.weight", ("+qkv", "-hidden")),
    (r"linear_qkv\.bias", ("+qkv",)),
    (r"linear_proj\.weight", ("+hidden", "-attended")),
    (r"linear_proj\.bias", ("+hidden",)),
    (r"linear_fc1\.weight", ("+fc1", "-hidden")),
    (r"linear_fc1\.bias", ("+fc1",)),
    (r"linear_fc2\.weight", ("+hidden", "-ffn")),
    (r"linear_fc2\.bias", ("+hidden",)),
    (r"(lm_head|pooler)\.dense\.weight", ("+hidden", "-hidden")),
    (r"(lm_head|pooler)\.dense\.bias", ("+hidden",)),
    (r"binary_head\.weight", (".", "-hidden")),
    (r"output_layer\.weight", (".", "-hidden")),
    (r"(binary_head|output_layer)\.bias", (".",)),
)
WRITERS = r"(linear_proj|linear_fc2)\.(weight|bias)"
POST_NORMS = r"post_(attention|mlp)_layernorm\.(weight|bias)"


def groups(kind, fine, coarse, *, runs=1):
    """Lists of fine indices, one for each coarse index."""
    m = fine // coarse
    if isinstance(kind, list):
        return kind
    if kind == "adjacent":
        return [[c * m + j for j in range(m)] for c in range(coarse)]
    if kind == "stack":
        return [[c + j * coarse for j in range(m)] for c in range(coarse)]
    run = groups("stack", fine // runs, coarse // runs)
    return [[r * (fine // runs) + f for f in members] for r in range(runs) for members in run]


class Oracle:
    """Both directions between two levels, given as plain sizes and lists of lists.

    Args:
        sizes: ``head_dim``, ``heads_per_group``, ``gated`` (gate and up rows in fc1), ``tied``, ``bert``.
        grouped: the groups of ``hidden``, ``head`` (KV groups), ``ffn`` and ``layer``.
    """

    def __init__(self, sizes, grouped, *, embedding, depth):
        self.sizes, self.embedding, self.depth = sizes, embedding, depth
        self.layers = grouped["layer"]
        q, d = sizes["heads_per_group"], sizes["head_dim"]
        head, ffn = incidence(grouped["head"]), incidence(grouped["ffn"])
        self.copies = {
            "hidden": incidence(grouped["hidden"]),
            "qkv": np.kron(head, np.eye((q + 2) * d)),
            "attended": np.kron(head, np.eye(q * d)),
            "ffn": ffn,
            "fc1": np.kron(np.eye(2 if sizes["gated"] else 1), ffn),
        }

    def sides(self, name):
        """The rule of a parameter: a sign and an axis for each side."""
        if re.search(r"embedding\..*_embeddings", name):
            return (".", "+hidden" if self.embedding == "lossless" else "-hidden")
        if re.search(r"decoder\.final_layernorm|lm_head\.layer_norm", name):
            return ("-hidden",) if self.embedding == "lossless" and self.sizes["tied"] else ("+hidden",)
        return next(sides for pattern, sides in LOSSLESS_RULES if re.search(pattern, name))

    def matrix(self, side, length, *, direction, quantity):
        """The matrix of one side, [coarse, fine] going down and [fine, coarse] going up."""
        if side == ".":
            return np.eye(length)
        copy = self.copies[side[1:]]
        m = copy.sum(axis=0)
        divide = copy / m
        produces = side[0] == "+"
        if quantity == "master":
            down, up = (divide.T, copy) if produces else (copy.T, divide)
        elif quantity == "exp_avg":
            down, up = (copy.T, divide) if produces else (divide.T, copy)
        else:
            down, up = (copy.T, divide / m) if produces else (divide.T, copy)
        return down if direction == "down" else up

    def depth_matrix(self, name, *, direction, quantity):
        """R [coarse layers, fine layers] or G [fine layers, coarse layers] for one kind of parameter."""
        copy = incidence(self.layers)
        m = copy.sum(axis=0)
        one = np.zeros_like(copy)  # a single layer of each group: its first, for the norm that ends a layer its last
        for coarse, members in enumerate(self.layers):
            one[max(members) if "post_mlp_layernorm" in name else min(members), coarse] = 1
        if self.depth == "first" and re.search(POST_NORMS, name):
            return one.T if direction == "down" else copy if quantity == "exp_avg_sq" else one
        writer = bool(re.search(WRITERS, name)) and self.depth != "copy"
        up = {"copy": copy, "split": copy / m, "first": one}[self.depth] if writer else copy
        if quantity == "master":
            return up if direction == "up" else (copy.T if writer else (copy / m).T)
        if direction == "down":
            return up.T
        if self.depth == "first":
            return one if quantity == "exp_avg" else copy
        k = np.ones_like(m) if writer else m
        return copy / (k if quantity == "exp_avg" else k * k)

    def apply(self, weights, *, direction, quantity="master"):
        """Map the real rows (no padding) of every parameter; float64 arrays by name."""
        root = direction == "down" and quantity == "exp_avg_sq"
        stacks: dict[str, dict[int, np.ndarray]] = {}
        for name, value in weights.items():
            template, layer = re.sub(r"layers\.\d+\.", "layers.{}.", name), re.search(r"layers\.(\d+)\.", name)
            value = np.sqrt(value.astype(np.float64)) if root else value.astype(np.float64)
            for dim, side in enumerate(self.sides(name)):
                matrix = self.matrix(side, value.shape[dim], direction=direction, quantity=quantity)
                value = np.moveaxis(np.tensordot(matrix, value, axes=(1, dim)), 0, dim)
            stacks.setdefault(template, {})[int(layer[1]) if layer else -1] = value
        out = {}
        for template, stack in stacks.items():
            if -1 in stack:
                out[template] = stack[-1]
                continue
            matrix = self.depth_matrix(template, direction=direction, quantity=quantity)
            mapped = np.tensordot(matrix, np.stack([stack[i] for i in range(len(stack))]), axes=(1, 0))
            if direction == "up" and quantity == "master" and re.search(POST_NORMS + "$", template):
                mapped[matrix.sum(axis=1) == 0] = 1 if template.endswith("weight") else 0
            out.update({template.format(i): mapped[i] for i in range(len(mapped))})
        return {name: value**2 for name, value in out.items()} if root else out

    def refine(self, fine, coarse, *, alpha, beta):
        """alpha P(y) + (1 - alpha) P(C x) + beta (x - P(C x))."""
        py = self.apply(coarse, direction="up")
        pcx = self.apply(self.apply(fine, direction="down"), direction="up")
        return {n: alpha * py[n] + (1 - alpha) * pcx[n] + beta * (fine[n] - pcx[n]) for n in fine}


def incidence(members):
    """[fine, coarse] with a one where the fine index is in the coarse index' group."""
    matrix = np.zeros((sum(map(len, members)), len(members)))
    for coarse, group in enumerate(members):
        matrix[group, coarse] = 1
    return matrix


def oracle_for(plan, kinds, *, runs=1, embedding="lossless", depth="first"):
    """The oracle of a plan's two levels, its groups built anew from ``kinds`` (axis -> grouping)."""
    a, b = plan.fine.shape, plan.coarse.shape
    counts = {
        "hidden": (a.hidden, b.hidden),
        "head": (a.kv_groups, b.kv_groups),
        "ffn": (a.ffn, b.ffn),
        "layer": (a.layers, b.layers),
    }
    grouped = {
        axis: groups(kinds.get(axis, "adjacent"), fine, coarse, runs=runs if axis in ("head", "ffn") else 1)
        for axis, (fine, coarse) in counts.items()
    }
    sizes = {
        "head_dim": a.head_dim,
        "heads_per_group": a.heads_per_group,
        "gated": a.activation == "swiglu",
        "tied": a.tied_embeddings,
    }
    return Oracle(sizes, grouped, embedding=embedding, depth=depth)
