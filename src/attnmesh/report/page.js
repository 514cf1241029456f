"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);  // null: there is nothing to draw
  const at = (id) => document.getElementById(id);
  const root = document.documentElement;
  let draw = () => {};

  // Light or dark: the system's setting until the button is used.
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const labelTheme = () => {
    at("theme").textContent = isDark() ? "Light" : "Dark";
    at("theme").setAttribute("aria-label", isDark() ? "Switch to light colors" : "Switch to dark colors");
  };
  at("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; labelTheme(); draw(); });
  system.addEventListener("change", () => { labelTheme(); draw(); });
  window.addEventListener("message", ({ source, data: sent }) => {  // from a page that embeds this one
    if (source !== window.parent || !["light", "dark"].includes(sent?.theme)) return;
    root.dataset.theme = sent.theme;
    labelTheme();
    draw();
  });
  labelTheme();
  if (!data) return;

  // The selection. Group and step -1: all of them. A link can name a schedule: report.html#ring
  const linked = data.schedules.find(({ name }) => `#${name}` === location.hash);
  const chosen = { schedule: linked ? linked.name : data.selected, group: -1, step: -1, color: "rank", order: "sequence", heads: 0, tile: null };

  // Rows of tables and drawings: a group is one rank, or a node where there are many ranks.
  const ranks = [...Array(data.world).keys()];
  const groupOf = (rank) => Math.floor(rank / data.group_size);
  const groups = [...Array(groupOf(data.world - 1) + 1).keys()];
  const members = (group) => ranks.filter((rank) => groupOf(rank) === group);
  const grouped = data.group_size > 1;
  const noun = data.group_noun;
  const isDim = (group) => chosen.group >= 0 && chosen.group !== group;

  // Neighbors differ in lightness as well as in hue, and every group is numbered.
  const PALETTE = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f7ae5", "#b8a800",
    "#004d7a", "#f3c46b", "#00634a", "#8e4468", "#9fd4f5", "#8a3b00", "#5a43b5", "#ded26a",
  ];
  // Steps run from dark to light, or on dark paper from pale violet to yellow: both ends stand off the paper.
  const ON_LIGHT = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b"];
  const ON_DARK = ["#8a63d2", "#7079dc", "#5590d6", "#43a5c8", "#36b7ae", "#4fc68b", "#86d268", "#bfdb4d", "#fde725"];
  const groupColor = (group) => PALETTE[group % PALETTE.length];
  const rankColor = (rank) => groupColor(groupOf(rank));
  const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const stepColor = (step, steps) => {
    const ramp = isDark() ? ON_DARK : ON_LIGHT;
    const place = steps > 1 ? (step / (steps - 1)) * (ramp.length - 1) : ramp.length / 2;
    const low = Math.min(ramp.length - 2, Math.floor(place));
    const [a, b] = [channels(ramp[low]), channels(ramp[low + 1])];
    return `rgb(${a.map((x, i) => Math.round(x + (b[i] - x) * (place - low))).join(" ")})`;
  };
  const inkOn = (color) => {
    const [r, g, b] = channels(color).map((x) => (x / 255) ** 2.2);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000000" : "#ffffff";
  };
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // Numbers as people read them.
  const whole = (n) => n.toLocaleString("en-US");
  const scaled = (n, units, base) => {
    let i = 0;
    while (n >= base && i < units.length - 1) { n /= base; i += 1; }
    return `${i === 0 ? whole(n) : n.toPrecision(3)} ${units[i]}`.trim();
  };
  const bytes = (n) => scaled(n, ["B", "kB", "MB", "GB", "TB"], 1000);
  const flops = (n, short = false) => scaled(n, ["", "k", "M", "G", "T", "P"].map((x) => (short ? x : `${x}FLOP`)), 1000);
  const seconds = (s) => (s >= 1 ? `${s.toPrecision(3)} s` : s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toPrecision(3)} µs`);
  const sum = (list) => list.reduce((a, b) => a + b, 0);
  const allSteps = (n) => (n === 1 ? "1 step" : `all ${n} steps`);
  const plural = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;

  // Elements are made, never parsed from text: nothing in the data can become markup.
  const element = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const drawn = (name, attributes = {}, ...children) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const swatch = (group) => element("span", { class: "swatch", style: `background:${groupColor(group)}` });

  const schedule = () => data.schedules.find((each) => each.name === chosen.schedule);
  const blockOf = ([rank, step, h0, h1, q0, q1, k0, k1, pairs]) => ({ rank, step, h0, h1, q0, q1, k0, k1, pairs });
  const blocks = () => schedule().blocks.map(blockOf);

  // Heads that are always computed together: one choice under a ring, several where heads are divided.
  const headClasses = () => {
    const edges = new Set([0, data.heads]);
    blocks().forEach((block) => edges.add(block.h0).add(block.h1));
    const sorted = [...edges].sort((a, b) => a - b);
    return sorted.slice(0, -1).map((first, i) => [first, sorted[i + 1]]);
  };
  const inClass = (block, heads) => block.h0 <= heads[0] && heads[1] <= block.h1;

  // ---- tokens
  // The tokens of some ranks as intervals [first, stop), neighbors joined, as far as the strip reaches.
  const intervals = (of) => {
    const parts = of.flatMap((rank) => data.shards[rank].runs.flatMap(([start, stop, step]) => {
      if (step === 1) return [[start, Math.min(stop, data.strip)]];
      const single = [];
      for (let p = start; p < Math.min(stop, data.strip); p += step) single.push([p, p + 1]);
      return single;
    })).filter(([from, to]) => from < to).sort((a, b) => a[0] - b[0]);
    const joined = [];
    for (const [from, to] of parts) {
      if (joined.length && joined[joined.length - 1][1] === from) joined[joined.length - 1][1] = to;
      else joined.push([from, to]);
    }
    return joined;
  };
  const segments = (of, group, labelled) => intervals(of).map(([from, to]) => {
    const width = (100 * (to - from)) / data.strip;
    const pixels = (width / 100) * (at("strips").clientWidth - 150);  // without the columns beside the bar
    const made = element("i", { style: `left:${(100 * from) / data.strip}%;width:${width}%;background:${groupColor(group)}` });
    if (labelled && pixels > 14) made.append(element("b", { style: `color:${inkOn(groupColor(group))}` }, String(group)));
    return made;
  });

  const drawStrips = () => {
    const now = chosen.step < 0 ? [] : blocks().filter((block) => block.step === chosen.step);
    const wholeBar = element("div", { class: "bar" });
    groups.forEach((group) => {
      for (const made of segments(members(group), group, true)) {
        if (isDim(group)) made.style.opacity = "0.15";
        wholeBar.append(made);
      }
    });
    const rows = [element("div", { class: "strip whole" }, element("span", { class: "name" }, "all"), wholeBar,
      element("span", { class: "count" }, whole(data.length)))];
    rows.push(element("div", { class: "axis" }, element("span", {}, "token 0"), element("span", {}, whole(data.strip - 1))));
    groups.forEach((group) => {
      const bar = element("div", { class: "bar" }, ...segments(members(group), group, false));
      const count = sum(members(group).map((rank) => data.shards[rank].count));
      const row = element("div", { class: `strip${isDim(group) ? " dim" : ""}` },
        element("span", { class: "name" }, `${noun} ${group}`), bar, element("span", { class: "count" }, whole(count)));
      if (chosen.step >= 0) {
        const line = element("div", { class: "used", title: "keys used in this step" });
        const used = new Set();
        now.filter((block) => groupOf(block.rank) === group).forEach((block) => { for (let k = block.k0; k < block.k1; k += 1) used.add(k); });
        groups.forEach((owner) => line.append(...segments(members(owner).filter((rank) => used.has(rank)), owner, false)));
        row.append(line);
      }
      rows.push(row);
    });
    at("strips").replaceChildren(...rows);
    at("tokens-intro").textContent = `Each ${noun} holds the tokens of its color, as queries and as keys.${grouped ? ` One row is ${data.group_size} ranks.` : ""}`;
    const part = data.strip < data.length ? `Ranks take tokens in turn: the first ${data.strip} are shown, the pattern repeats. ` : "";
    at("tokens-note").textContent = part + (chosen.step < 0 ? "Select a step to see which keys it uses."
      : `Thin lines: the keys that each ${noun} uses in this step, in the colors of their owners.`);
  };

  // ---- tiles
  const canvas = at("tiles");
  let order = [];
  let lookup = [];
  let geometry = null;

  const layTiles = () => {
    const byRank = chosen.order === "rank" || data.in_turn;
    order = data.bands.map((_, i) => i);
    if (!byRank) order.sort((a, b) => data.bands[a][1] - data.bands[b][1]);
    const heads = headClasses()[chosen.heads];
    lookup = ranks.map(() => Array(data.world).fill(null));
    for (const block of blocks()) {
      if (!inClass(block, heads)) continue;
      for (let q = block.q0; q < block.q1; q += 1) for (let k = block.k0; k < block.k1; k += 1) lookup[q][k] = block;
    }
  };
  const tileAt = (row, column) => {
    const [q, k] = [order[row], order[column]];
    const [qBand, kBand] = [data.bands[q], data.bands[k]];
    const pairs = data.pairs[q][k];
    return { qBand, kBand, pairs, most: data.masks * qBand[3] * kBand[3], block: pairs ? lookup[qBand[0]][kBand[0]] : null };
  };

  const drawTiles = () => {
    const width = canvas.clientWidth;
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${width}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = canvas.width;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const n = order.length;
    const margin = 12;
    const size = (width - margin) / n;
    geometry = { margin, size, n };
    pen.fillStyle = css("--fill");
    pen.fillRect(margin, margin, width - margin, width - margin);
    const gap = size >= 5 ? 0.6 : 0;
    const steps = schedule().steps.length;
    for (let row = 0; row < n; row += 1) {
      for (let column = 0; column < n; column += 1) {
        const { block, pairs, most } = tileAt(row, column);
        if (!block) continue;
        let strength = 1;
        if (isDim(groupOf(block.rank))) strength = 0.1;
        else if (chosen.step >= 0 && block.step < chosen.step) strength = 0.32;
        else if (chosen.step >= 0 && block.step > chosen.step) strength = 0.08;
        const color = chosen.color === "rank" ? rankColor(block.rank) : stepColor(block.step, steps);
        const [x, y, side] = [margin + column * size, margin + row * size, size - gap];
        pen.fillStyle = color;
        if (pairs === most) {
          pen.globalAlpha = strength;
          pen.fillRect(x, y, side, side);
        } else {
          // Partly visible: a paler square, its lower half in the full color.
          pen.globalAlpha = strength * 0.3;
          pen.fillRect(x, y, side, side);
          pen.globalAlpha = strength;
          pen.beginPath();
          pen.moveTo(x, y);
          pen.lineTo(x + side, y + side);
          pen.lineTo(x, y + side);
          pen.fill();
        }
      }
    }
    pen.globalAlpha = 1;
    // Who holds the queries (left) and the keys (top), and where shards end.
    for (let i = 0; i < n; i += 1) {
      const rank = data.bands[order[i]][0];
      pen.globalAlpha = isDim(groupOf(rank)) ? 0.2 : 1;
      pen.fillStyle = rankColor(rank);
      pen.fillRect(0, margin + i * size, 8, size + 0.5);
      pen.fillRect(margin + i * size, 0, size + 0.5, 8);
      pen.globalAlpha = 1;
      if (i && groupOf(rank) !== groupOf(data.bands[order[i - 1]][0])) {
        pen.fillStyle = css("--card");
        pen.fillRect(margin, margin + i * size - 1, width, 1.4);
        pen.fillRect(margin + i * size - 1, margin, 1.4, width);
      }
    }
    if (chosen.tile) {
      pen.strokeStyle = css("--ink");
      pen.lineWidth = 2;
      pen.strokeRect(margin + chosen.tile[1] * size - 1, margin + chosen.tile[0] * size - 1, size + 1, size + 1);
    }
  };

  const positions = ([, first, last]) => (first === last ? whole(first) : `${whole(first)} to ${whole(last)}`);
  const drawTileText = () => {
    const put = (text) => { at("tile-text").textContent = text; };
    if (!chosen.tile) {
      put(`Rows are queries, columns are keys; the edges show which ${noun} holds them.${data.in_turn ? " Both are ordered by rank." : ""}`);
      return;
    }
    const { qBand, kBand, pairs, most, block } = tileAt(...chosen.tile);
    const where = `Queries ${positions(qBand)} (rank ${qBand[0]}), keys ${positions(kBand)} (rank ${kBand[0]})${data.in_turn ? `, every ${data.world}th` : ""}`;
    if (!block) { put(`${where}: masked, not computed.`); return; }
    const share = `${pairs === most ? `all ${whole(pairs)}` : `${whole(pairs)} of ${whole(most)}`} pairs visible${data.masks > 1 ? ` in ${data.masks} sequences` : ""}`;
    put(`${where}: ${share}. Computed by rank ${block.rank} in step ${block.step + 1}: ${schedule().steps[block.step]}.`);
  };

  const drawLegend = () => {
    const parts = [];
    const key = (name, label) => element("span", {}, element("i", { class: name }), label);
    if (chosen.color === "rank") {
      groups.forEach((group) => parts.push(element("span", {}, element("i", { style: `background:${groupColor(group)}` }), grouped ? `${noun} ${group}` : String(group))));
    } else {
      const steps = schedule().steps.length;
      const stops = [...Array(steps).keys()].map((step) => stepColor(step, steps));
      const ramp = stops.length > 1 ? `linear-gradient(to right, ${stops.join(", ")})` : stops[0];
      parts.push(element("span", {}, "step 1", element("i", { class: "ramp", style: `background:${ramp}` }), `step ${steps}`));
    }
    parts.push(key("full", "all pairs visible"), key("partial", "some"), key("empty", "none"));
    at("legend").replaceChildren(...parts);
  };

  // ---- the selected step: in words, as a graph of messages, and as a table
  const drawNow = () => {
    const here = schedule();
    const onStep = (step) => chosen.step < 0 || step === chosen.step;
    const work = ranks.map(() => 0);
    blocks().forEach((block) => { if (onStep(block.step)) work[block.rank] += block.pairs * (block.h1 - block.h0) * data.flops_per_pair; });
    const messages = here.messages.filter(([step]) => onStep(step));
    const sent = groups.map(() => 0);
    const received = groups.map(() => 0);
    const peers = groups.map(() => new Set());
    messages.forEach(([, source, target, nbytes]) => {
      sent[groupOf(source)] += nbytes;
      received[groupOf(target)] += nbytes;
      peers[groupOf(source)].add(groupOf(target));
    });

    const steps = here.steps.length;
    at("now-title").textContent = chosen.step < 0 ? `Forward, ${allSteps(steps)}` : `Forward, step ${chosen.step + 1} of ${steps}`;
    const active = work.filter((w) => w > 0).length;
    const what = [...new Set(messages.map((message) => message[4]))].join(", ");
    const computed = active ? `${active} of ${plural(data.world, "rank")} compute, ${flops(sum(work))} in total. ` : "No computation. ";
    const inside = sum(messages.filter(([, a, b]) => groupOf(a) === groupOf(b)).map((message) => message[3]));
    const stays = grouped && inside ? ` ${inside === sum(sent) ? "All" : bytes(inside)} of it within a ${noun} (not drawn).` : "";
    const moved = messages.length ? `${bytes(sum(sent))} sent in ${plural(messages.length, "message")}: ${what}.${stays}` : "No communication.";
    at("now-text").textContent = computed + moved;
    drawWheel(messages);

    const head = [noun, "FLOPs", "sent", "to", "received"].map((name) => element("th", { scope: "col" }, name));
    const rows = groups.map((group) => {
      const computes = sum(members(group).map((rank) => work[rank]));
      const to = [...peers[group]].filter((peer) => peer !== group).sort((a, b) => a - b);
      if (peers[group].has(group)) to.push("own");
      return element("tr", isDim(group) ? { class: "dim" } : {},
        element("td", {}, swatch(group), String(group)),
        element("td", {}, computes ? flops(computes, true) : "–"),
        element("td", {}, sent[group] ? bytes(sent[group]) : "–"),
        element("td", {}, to.length > 3 ? plural(to.length, noun) : to.join(", ") || "–"),
        element("td", {}, received[group] ? bytes(received[group]) : "–"));
    });
    at("now-table").replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
  };

  const drawWheel = (messages) => {
    if (groups.length < 2) { at("wheel").replaceChildren(); return; }
    const radius = 112;
    const dot = Math.max(7, Math.min(15, 300 / groups.length));
    const place = (group) => {
      const angle = (2 * Math.PI * group) / groups.length - Math.PI / 2;
      return [140 + radius * Math.cos(angle), 140 + radius * Math.sin(angle)];
    };
    const together = new Map();
    messages.forEach(([, source, target, nbytes]) => {
      const [from, to] = [groupOf(source), groupOf(target)];
      const key = from * groups.length + to;
      if (from !== to) together.set(key, (together.get(key) || 0) + nbytes);
    });
    const most = Math.max(1, ...together.values());
    const svg = drawn("svg", { viewBox: "0 0 280 280", role: "img", "aria-label": `Messages between ${noun}s` });
    for (const [key, nbytes] of together) {
      const [source, target] = [Math.floor(key / groups.length), key % groups.length];
      const [[x0, y0], [x1, y1]] = [place(source), place(target)];
      const long = Math.hypot(x1 - x0, y1 - y0);
      const [ux, uy] = [(x1 - x0) / long, (y1 - y0) / long];
      // Bent to the right, so that the two directions do not overlap.
      const [mx, my] = [(x0 + x1) / 2 - uy * long * 0.12, (y0 + y1) / 2 + ux * long * 0.12];
      const back = Math.hypot(x1 - mx, y1 - my);
      const [ex, ey] = [x1 - ((x1 - mx) / back) * (dot + 3), y1 - ((y1 - my) / back) * (dot + 3)];
      const [vx, vy] = [(x1 - mx) / back, (y1 - my) / back];
      const off = isDim(source) && isDim(target);
      const group = drawn("g", { opacity: off ? 0.08 : together.size > 40 && chosen.group < 0 ? 0.45 : 0.9 });
      group.append(
        drawn("title", {}, `${noun} ${source} sends ${bytes(nbytes)} to ${noun} ${target}`),
        drawn("path", { d: `M${x0} ${y0}Q${mx} ${my} ${ex} ${ey}`, fill: "none", stroke: groupColor(source), "stroke-width": 0.8 + (2.4 * nbytes) / most }),
        drawn("path", { d: `M${ex + vx * 4} ${ey + vy * 4}L${ex - vx * 3 - vy * 4} ${ey - vy * 3 + vx * 4}L${ex - vx * 3 + vy * 4} ${ey - vy * 3 - vx * 4}Z`, fill: groupColor(source) }),
      );
      svg.append(group);
    }
    groups.forEach((group) => {
      const [x, y] = place(group);
      const color = groupColor(group);
      const label = drawn("text", { x, y: y + 4, "text-anchor": "middle", style: `fill:${inkOn(color)};font-weight:600;font-size:${Math.min(12, dot)}px` });
      label.textContent = String(group);
      svg.append(drawn("g", { opacity: isDim(group) ? 0.3 : 1 }, drawn("circle", { cx: x, cy: y, r: dot, fill: color }), label));
    });
    at("wheel").replaceChildren(svg);
  };

  // ---- bars
  const drawLoads = () => {
    const here = schedule();
    const busiest = (values) => groups.map((group) => Math.max(...members(group).map((rank) => values[rank])));
    const sent = (way) => here[way].intra_node.map((n, rank) => n + here[way].inter_node[rank]);
    const chart = (title, text, forward, backward, format) => {
      const [there, back] = [busiest(forward), busiest(backward)];
      const most = Math.max(1, ...there, ...back);
      const bar = (value, group, name) => element("div", { class: `bar ${name}`, style: `width:${(100 * value) / most}%;background:${groupColor(group)}` });
      const rows = groups.map((group) => element("tr", isDim(group) ? { class: "dim" } : {},
        element("td", {}, String(group)),
        element("td", { class: "track" }, bar(there[group], group, "forward"), bar(back[group], group, "backward")),
        element("td", { class: "value" }, format(there[group], true)),
        element("td", { class: "value" }, format(back[group], true))));
      const head = [noun, "", "forward", "backward"].map((name, i) => element("th", { scope: "col", class: i > 1 ? "number" : "" }, name));
      return element("div", { class: "chart" }, element("h3", {}, title), element("p", {}, text), element("div", { class: "scroll" },
        element("table", { class: "bars" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))));
    };
    const all = sum(sent("forward")) + sum(sent("backward"));
    const between = Math.round((100 * (sum(here.forward.inter_node) + sum(here.backward.inter_node))) / (all || 1));
    const nodes = data.ranks_per_node < data.world ? `, ${between}% of it between nodes` : "";
    const charts = [
      chart("FLOPs", `All ranks: ${flops(sum(here.forward.flops))} forward, ${flops(sum(here.backward.flops))} backward.`, here.forward.flops, here.backward.flops, flops),
      chart("Bytes sent", `All ranks: ${bytes(all)}${nodes}.`, sent("forward"), sent("backward"), bytes),
    ];
    at("loads").replaceChildren(...charts.slice(0, all ? 2 : 1));
    at("imbalance").textContent = `${grouped ? `Each row is the busiest rank of a ${noun}. ` : ""}Load imbalance: the busiest rank has ${here.imbalance.toFixed(3)} times the mean FLOPs. Backward bars are paler.`;
  };

  // ---- timelines
  const TRACKS = ["compute", "wait", "send", "receive"];
  const drawTimelines = () => {
    const shown = [schedule().timeline, ...data.timelines].filter(({ spans }) => spans.length);
    at("timelines").replaceChildren(...shown.map((one, number) => timeline(one, number)));
  };
  const timeline = (one, number) => {
    const width = Math.max(280, at("timelines").clientWidth);
    const rows = [...new Set(one.spans.map((span) => span[0]))].sort((a, b) => a - b);
    // Where every row is the first rank of another group, it stands for the group.
    const stands = grouped && rows.every((rank) => rank % data.group_size === 0);
    const rowName = (rank) => (stands ? `${noun} ${groupOf(rank)}` : `rank ${rank}`);
    const [lane, left, top] = [8, 52, 4];
    const tall = lane * 3 + 8;
    const end = Math.max(...one.spans.map((span) => span[4]), 1e-12);
    const x = (t) => left + ((width - left - 8) * t) / end;
    const bottom = top + rows.length * tall;
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${bottom + 24}`, height: bottom + 24, role: "img", "aria-label": `Timeline, ${one.name}` });
    const hatch = drawn("pattern", { id: `hatch-${number}`, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      drawn("rect", { width: 2, height: 5, fill: "var(--wait)" }));
    svg.append(drawn("defs", {}, hatch));
    const rough = end / Math.max(2, Math.floor(width / 130));
    const power = 10 ** Math.floor(Math.log10(rough));
    const ticks = [1, 2, 5, 10].map((m) => m * power);
    const tick = ticks.find((t) => t >= rough && t < end) || ticks.findLast((t) => t < end);
    for (let t = 0; t <= end; t += tick) {
      svg.append(drawn("line", { x1: x(t), x2: x(t), y1: 0, y2: bottom, stroke: "var(--line)" }));
      const label = drawn("text", { x: x(t), y: bottom + 16, "text-anchor": t ? "middle" : "start" });
      label.textContent = t ? seconds(Number(t.toPrecision(6))) : "0";
      if (x(t) < width - 24) svg.append(label);
    }
    const detail = element("p", { class: "detail", "aria-live": "polite" });
    rows.forEach((rank, i) => {
      const label = drawn("text", { x: 0, y: top + i * tall + lane * 1.5 + 4, opacity: isDim(groupOf(rank)) ? 0.3 : 1 });
      label.textContent = rowName(rank);
      svg.append(label);
    });
    const bars = drawn("g");
    for (const [rank, track, name, begin, stop, step, facts] of one.spans) {
      const i = rows.indexOf(rank);
      const y = top + i * tall + { compute: 0, wait: 0, send: lane + 1, receive: 2 * lane + 2 }[track];
      const off = isDim(groupOf(rank)) || (chosen.step >= 0 && step !== null && step !== chosen.step);
      const bar = drawn("rect", { x: x(begin), y, width: Math.max(0.6, x(stop) - x(begin)), height: lane, rx: 1.5,
        fill: track === "wait" ? `url(#hatch-${number})` : `var(--${track})`, opacity: off ? 0.15 : 1 });
      const text = `Rank ${rank}, ${track}: ${name}, ${seconds(stop - begin)} from ${seconds(begin)} on${facts ? ` (${facts})` : ""}.`;
      bar.append(drawn("title", {}, text));
      bar.addEventListener("pointerenter", () => { detail.textContent = text; });
      bars.append(bar);
    }
    svg.append(bars);
    const of = (track) => sum(one.spans.filter((span) => span[1] === track).map((span) => span[4] - span[3]));
    const share = (time) => `${((100 * time) / (end * rows.length)).toFixed(0)}%`;
    const summary = `${seconds(end)} in total${one.hardware ? `, estimated for ${one.hardware}` : ""}. On average a rank computes ${share(of("compute"))} of the time and waits ${share(of("wait"))}.`
      + (stands ? ` Each row is the first rank of a ${noun}.` : "")
      + (one.left_out ? ` Only the first ${whole(one.spans.length)} events are drawn; ${whole(one.left_out)} more follow.` : "");
    const legend = element("div", { class: "legend" }, ...TRACKS.map((track) => element("span", {},
      element("i", track === "wait" ? { class: "hatched" } : { style: `background:var(--${track})` }), track)));
    return element("div", { class: "timeline" }, element("h3", {}, one.name), element("p", {}, summary), svg, legend, detail);
  };

  // ---- controls
  const fill = (select, options) => select.replaceChildren(...options.map(([value, label]) => element("option", { value }, label)));
  const fitHeads = () => {
    // The selected step or group may not compute the heads shown: show the first that it does compute.
    const classes = headClasses();
    chosen.heads = Math.min(chosen.heads, classes.length - 1);
    const wanted = blocks().filter((block) => !isDim(groupOf(block.rank)) && (chosen.step < 0 || block.step === chosen.step));
    if (wanted.length && !wanted.some((block) => inClass(block, classes[chosen.heads]))) {
      chosen.heads = classes.findIndex((heads) => inClass(wanted[0], heads));
    }
    at("heads-field").hidden = classes.length < 2;
    fill(at("heads"), classes.map(([a, b], i) => [i, b - a === 1 ? `head ${a}` : `heads ${a} to ${b - 1}`]));
    at("heads").value = chosen.heads;
  };
  const drawStepName = () => {
    const { steps } = schedule();
    const text = chosen.step < 0 ? allSteps(steps.length) : `step ${chosen.step + 1} of ${steps.length}: ${steps[chosen.step]}`;
    at("step").max = steps.length;
    at("step").value = chosen.step + 1;
    at("step").setAttribute("aria-valuetext", text);
    at("step-name").textContent = text[0].toUpperCase() + text.slice(1);
  };
  draw = () => {
    drawStepName();
    fitHeads();
    drawStrips();
    layTiles();
    drawTiles();
    drawLegend();
    drawTileText();
    drawNow();
    drawLoads();
    drawTimelines();
  };

  let playing = 0;
  const stop = () => {
    clearInterval(playing);
    playing = 0;
    at("play").textContent = "\u25B6\uFE0E";
    at("play").setAttribute("aria-label", "Play the steps");
  };
  at("play").addEventListener("click", () => {
    if (playing) { stop(); return; }
    const { length } = schedule().steps;
    const next = () => {
      if (chosen.step + 1 >= length) { stop(); return; }
      chosen.step += 1;
      draw();
    };
    if (chosen.step + 1 >= length) chosen.step = -1;
    playing = setInterval(next, 900);
    at("play").textContent = "\u275A\u275A";
    at("play").setAttribute("aria-label", "Stop");
    next();
  });

  fill(at("schedule"), data.schedules.map(({ name }) => [name, name === data.selected ? `${name} (selected)` : name]));
  at("schedule").value = chosen.schedule;
  at("group-label").textContent = noun[0].toUpperCase() + noun.slice(1);
  at("color-group").textContent = noun;
  const named = (group) => (grouped ? `${noun} ${group} (ranks ${members(group)[0]} to ${members(group).at(-1)})` : `rank ${group}`);
  fill(at("group"), [[-1, `all ${noun}s`], ...groups.map((group) => [group, named(group)])]);
  at("schedule").addEventListener("change", (event) => { stop(); chosen.schedule = event.target.value; chosen.step = -1; chosen.heads = 0; draw(); });
  at("group").addEventListener("change", (event) => { chosen.group = Number(event.target.value); draw(); });
  at("step").addEventListener("input", (event) => { stop(); chosen.step = Number(event.target.value) - 1; draw(); });
  at("heads").addEventListener("change", (event) => { chosen.heads = Number(event.target.value); layTiles(); drawTiles(); drawTileText(); });
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  document.querySelectorAll("input[name=color]").forEach((input) => input.addEventListener("change", () => {
    chosen.color = input.value; drawTiles(); drawLegend();
  }));
  document.querySelectorAll("input[name=order]").forEach((input) => input.addEventListener("change", () => {
    chosen.order = input.value; chosen.tile = null; layTiles(); drawTiles(); drawTileText();
  }));
  const ascends = data.bands.every((band, i) => !i || data.bands[i - 1][1] < band[1]);
  at("orders").hidden = data.in_turn || ascends;  // nothing to choose

  const pick = (row, column) => {
    const n = geometry.n;
    if (row < 0 || column < 0 || row >= n || column >= n) return;
    if (chosen.tile && chosen.tile[0] === row && chosen.tile[1] === column) return;
    chosen.tile = [row, column];
    drawTiles();
    drawTileText();
  };
  const pointed = (event) => {
    const box = canvas.getBoundingClientRect();
    pick(Math.floor((event.clientY - box.top - geometry.margin) / geometry.size), Math.floor((event.clientX - box.left - geometry.margin) / geometry.size));
  };
  canvas.addEventListener("pointermove", pointed);
  canvas.addEventListener("pointerdown", pointed);
  canvas.addEventListener("keydown", (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const [row, column] = chosen.tile || [0, -move[1]];
    pick(row + move[0], column + move[1]);
  });

  let width = 0;
  new ResizeObserver(() => {
    if (canvas.clientWidth !== width) { width = canvas.clientWidth; drawStrips(); drawTiles(); drawTimelines(); }
  }).observe(canvas);
  draw();
})();
