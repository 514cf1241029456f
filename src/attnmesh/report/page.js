"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const root = document.documentElement;

  // Light or dark: as the system has it until someone says otherwise.
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  // What is chosen. Rank and step -1: all of them.
  const chosen = { schedule: data.chosen, rank: -1, step: -1, colour: "rank", order: "sequence", heads: 0, tile: null };

  // Colours. Neighbours differ in lightness as well as in hue, and every rank carries its number.
  const PALETTE = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f7ae5", "#b8a800",
    "#004d7a", "#f3c46b", "#00634a", "#8e4468", "#9fd4f5", "#8a3b00", "#5a43b5", "#ded26a",
  ];
  // Steps run from dark to light, or on dark paper from pale violet to yellow: both ends stand off the paper.
  const ON_LIGHT = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b"];
  const ON_DARK = ["#8a63d2", "#7079dc", "#5590d6", "#43a5c8", "#36b7ae", "#4fc68b", "#86d268", "#bfdb4d", "#fde725"];
  const rankColour = (rank) => (rank < PALETTE.length ? PALETTE[rank] : `hsl(${(rank * 137.5) % 360} 50% 50%)`);
  const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const stepColour = (step, steps) => {
    const ramp = isDark() ? ON_DARK : ON_LIGHT;
    const place = steps > 1 ? (step / (steps - 1)) * (ramp.length - 1) : ramp.length / 2;
    const low = Math.min(ramp.length - 2, Math.floor(place));
    const [a, b] = [channels(ramp[low]), channels(ramp[low + 1])];
    return `rgb(${a.map((x, i) => Math.round(x + (b[i] - x) * (place - low))).join(" ")})`;
  };
  const inkOn = (colour) => {
    if (!colour.startsWith("#")) return "#000000";
    const [r, g, b] = channels(colour).map((x) => (x / 255) ** 2.2);
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
  const operations = (n) => scaled(n, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"], 1000);
  const seconds = (s) => (s >= 1 ? `${s.toPrecision(3)} s` : s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toPrecision(3)} µs`);
  const sum = (list) => list.reduce((a, b) => a + b, 0);
  const ranks = [...Array(data.world).keys()];

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
  const swatch = (rank) => element("span", { class: "swatch", style: `background:${rankColour(rank)}` });

  const schedule = () => data.schedules.find((each) => each.name === chosen.schedule);
  const visitOf = ([rank, step, h0, h1, q0, q1, k0, k1, pairs]) => ({ rank, step, h0, h1, q0, q1, k0, k1, pairs });
  const visits = () => schedule().visits.map(visitOf);
  const dims = (rank) => chosen.rank >= 0 && chosen.rank !== rank;

  // Heads that are always computed together: one choice under a ring, several where heads are divided.
  const headClasses = () => {
    const edges = new Set([0, data.heads]);
    visits().forEach((v) => edges.add(v.h0).add(v.h1));
    const sorted = [...edges].sort((a, b) => a - b);
    return sorted.slice(0, -1).map((first, i) => [first, sorted[i + 1]]);
  };
  const inClass = (v, heads) => v.h0 <= heads[0] && heads[1] <= v.h1;

  // ---- tokens
  const segments = (runs, rank, labelled) => {
    const out = [];
    const put = (from, to) => {
      if (from >= data.strip) return;
      const width = (100 * (Math.min(to, data.strip) - from)) / data.strip;
      const made = element("i", { style: `left:${(100 * from) / data.strip}%;width:${width}%;background:${rankColour(rank)}` });
      if (labelled && width > 2.5) made.append(element("b", { style: `color:${inkOn(rankColour(rank))}` }, String(rank)));
      out.push(made);
    };
    for (const [start, stop, step] of runs) {
      if (step === 1) put(start, stop);
      else for (let p = start; p < Math.min(stop, data.strip); p += step) put(p, p + 1);
    }
    return out;
  };

  const drawStrips = () => {
    const now = chosen.step < 0 ? [] : visits().filter((v) => v.step === chosen.step);
    const wholeBar = element("div", { class: "bar" });
    ranks.forEach((rank) => {
      for (const made of segments(data.shards[rank].runs, rank, true)) {
        if (dims(rank)) made.style.opacity = "0.15";
        wholeBar.append(made);
      }
    });
    const rows = [element("div", { class: "strip whole" }, element("span", { class: "name" }, "all"), wholeBar,
      element("span", { class: "count" }, whole(data.length)))];
    rows.push(element("div", { class: "axis" }, element("span", {}, "token 0"), element("span", {}, whole(data.strip - 1))));
    ranks.forEach((rank) => {
      const bar = element("div", { class: "bar" }, ...segments(data.shards[rank].runs, rank, false));
      const row = element("div", { class: `strip${dims(rank) ? " dim" : ""}` },
        element("span", { class: "name" }, `rank ${rank}`), bar, element("span", { class: "count" }, whole(data.shards[rank].count)));
      if (chosen.step >= 0) {
        const visiting = element("div", { class: "visiting", title: "keys that this rank computes on now" });
        const whose = new Set();
        now.filter((v) => v.rank === rank).forEach((v) => { for (let k = v.k0; k < v.k1; k += 1) whose.add(k); });
        whose.forEach((k) => visiting.append(...segments(data.shards[k].runs, k, false)));
        row.append(visiting);
      }
      rows.push(row);
    });
    at("strips").replaceChildren(...rows);
    const part = data.strip < data.length ? `Ranks take tokens in turn: the first ${data.strip} are shown, the others follow in the same way. ` : "";
    at("tokens-note").textContent = part + (chosen.step < 0 ? "Choose a step to see whose keys each rank computes on."
      : "The thin lines are the keys that a rank computes on at this step, in their owners' colours.");
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
    for (const v of visits()) {
      if (!inClass(v, heads)) continue;
      for (let q = v.q0; q < v.q1; q += 1) for (let k = v.k0; k < v.k1; k += 1) lookup[q][k] = v;
    }
  };
  const tileAt = (row, column) => {
    const [q, k] = [order[row], order[column]];
    const [qBand, kBand] = [data.bands[q], data.bands[k]];
    const pairs = data.pairs[q][k];
    return { qBand, kBand, pairs, full: pairs === qBand[3] * kBand[3], visit: pairs ? lookup[qBand[0]][kBand[0]] : null };
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
        const { visit, full } = tileAt(row, column);
        if (!visit) continue;
        let strength = 1;
        if (dims(visit.rank)) strength = 0.1;
        else if (chosen.step >= 0 && visit.step < chosen.step) strength = 0.32;
        else if (chosen.step >= 0 && visit.step > chosen.step) strength = 0.08;
        const colour = chosen.colour === "rank" ? rankColour(visit.rank) : stepColour(visit.step, steps);
        const [x, y, side] = [margin + column * size, margin + row * size, size - gap];
        pen.fillStyle = colour;
        if (full) {
          pen.globalAlpha = strength;
          pen.fillRect(x, y, side, side);
        } else {
          // Partly seen: a paler square, its lower half in the full colour.
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
      pen.globalAlpha = dims(rank) ? 0.2 : 1;
      pen.fillStyle = rankColour(rank);
      pen.fillRect(0, margin + i * size, 8, size + 0.5);
      pen.fillRect(margin + i * size, 0, size + 0.5, 8);
      pen.globalAlpha = 1;
      if (i && rank !== data.bands[order[i - 1]][0]) {
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
  const sayTile = () => {
    if (!chosen.tile) { at("tile-says").textContent = `Rows of tiles are queries, columns are keys; the edges show who holds them.${data.in_turn ? " Both are put together by rank." : ""}`; return; }
    const { qBand, kBand, pairs, full, visit } = tileAt(...chosen.tile);
    const where = `Queries ${positions(qBand)} (of rank ${qBand[0]}) and keys ${positions(kBand)} (of rank ${kBand[0]})`;
    const turn = data.in_turn ? `, every ${data.world}th` : "";
    if (!visit) { at("tile-says").textContent = `${where}${turn}: nothing is seen, nothing is computed.`; return; }
    const share = full ? `all ${whole(pairs)} pairs seen` : `${whole(pairs)} of ${whole(qBand[3] * kBand[3])} pairs seen`;
    at("tile-says").textContent = `${where}${turn}: ${share}. Computed by rank ${visit.rank} at step ${visit.step + 1}, ${schedule().steps[visit.step]}.`;
  };

  const drawLegend = () => {
    const parts = [];
    const key = (name, says) => element("span", {}, element("i", { class: name }), says);
    if (chosen.colour === "rank") {
      ranks.forEach((rank) => parts.push(element("span", {}, element("i", { style: `background:${rankColour(rank)}` }), String(rank))));
    } else {
      const steps = schedule().steps.length;
      const stops = [...Array(steps).keys()].map((step) => stepColour(step, steps));
      const ramp = stops.length > 1 ? `linear-gradient(to right, ${stops.join(", ")})` : stops[0];
      parts.push(element("span", {}, "step 1", element("i", { class: "ramp", style: `background:${ramp}` }), `step ${steps}`));
    }
    parts.push(key("full", "all pairs seen"), key("partial", "some"), key("empty", "none"));
    at("legend").replaceChildren(...parts);
  };

  // ---- this step: in words, as a wheel of messages, and rank by rank
  const drawNow = () => {
    const here = schedule();
    const onStep = (step) => chosen.step < 0 || step === chosen.step;
    const work = ranks.map(() => 0);
    visits().forEach((v) => { if (onStep(v.step)) work[v.rank] += v.pairs * (v.h1 - v.h0) * data.operations_a_pair; });
    const messages = here.messages.filter(([step]) => onStep(step));
    const sent = ranks.map(() => 0);
    const received = ranks.map(() => 0);
    const peers = ranks.map(() => new Set());
    messages.forEach(([, source, target, nbytes]) => { sent[source] += nbytes; received[target] += nbytes; peers[source].add(target); });

    const steps = here.steps.length;
    at("now-title").textContent = chosen.step < 0 ? `All ${steps} step${steps > 1 ? "s" : ""}, forward` : `Step ${chosen.step + 1} of ${steps}, forward`;
    const busy = work.filter((w) => w > 0).length;
    const what = [...new Set(messages.map((message) => message[4]))].join(", ");
    const computed = busy ? `${busy} of ${data.world} ranks compute, ${operations(sum(work))} in all. ` : "Nothing is computed. ";
    const travels = messages.length ? `${bytes(sum(sent))} travel in ${whole(messages.length)} messages: ${what}.` : "Nothing travels.";
    at("now-says").textContent = computed + travels;
    drawWheel(messages);

    const head = ["rank", "computes", "sends", "to", "receives"].map((name) => element("th", { scope: "col" }, name));
    const rows = ranks.map((rank) => element("tr", dims(rank) ? { class: "dim" } : {},
      element("td", {}, swatch(rank), String(rank)),
      element("td", {}, work[rank] ? operations(work[rank]) : "–"),
      element("td", {}, sent[rank] ? bytes(sent[rank]) : "–"),
      element("td", {}, peers[rank].size > 3 ? `${peers[rank].size} ranks` : [...peers[rank]].join(", ") || "–"),
      element("td", {}, received[rank] ? bytes(received[rank]) : "–")));
    at("now-table").replaceChildren(element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
  };

  const drawWheel = (messages) => {
    if (data.world < 2 || data.world > 32) { at("wheel").replaceChildren(); return; }
    const radius = 112;
    const dot = Math.max(7, Math.min(15, 300 / data.world));
    const place = (rank) => {
      const angle = (2 * Math.PI * rank) / data.world - Math.PI / 2;
      return [140 + radius * Math.cos(angle), 140 + radius * Math.sin(angle)];
    };
    const together = new Map();
    messages.forEach(([, source, target, nbytes]) => {
      const key = source * data.world + target;
      together.set(key, (together.get(key) || 0) + nbytes);
    });
    const most = Math.max(1, ...together.values());
    const svg = drawn("svg", { viewBox: "0 0 280 280", role: "img", "aria-label": "Which rank sends to which" });
    for (const [key, nbytes] of together) {
      const [source, target] = [Math.floor(key / data.world), key % data.world];
      const [[x0, y0], [x1, y1]] = [place(source), place(target)];
      const long = Math.hypot(x1 - x0, y1 - y0);
      const [ux, uy] = [(x1 - x0) / long, (y1 - y0) / long];
      // Bent to the right, so that both directions between two ranks can be told apart.
      const [mx, my] = [(x0 + x1) / 2 - uy * long * 0.12, (y0 + y1) / 2 + ux * long * 0.12];
      const back = Math.hypot(x1 - mx, y1 - my);
      const [ex, ey] = [x1 - ((x1 - mx) / back) * (dot + 3), y1 - ((y1 - my) / back) * (dot + 3)];
      const [vx, vy] = [(x1 - mx) / back, (y1 - my) / back];
      const off = chosen.rank >= 0 && source !== chosen.rank && target !== chosen.rank;
      const group = drawn("g", { opacity: off ? 0.08 : together.size > 40 && chosen.rank < 0 ? 0.45 : 0.9 });
      group.append(
        drawn("title", {}, `rank ${source} sends rank ${target} ${bytes(nbytes)}`),
        drawn("path", { d: `M${x0} ${y0}Q${mx} ${my} ${ex} ${ey}`, fill: "none", stroke: rankColour(source), "stroke-width": 0.8 + (2.4 * nbytes) / most }),
        drawn("path", { d: `M${ex + vx * 4} ${ey + vy * 4}L${ex - vx * 3 - vy * 4} ${ey - vy * 3 + vx * 4}L${ex - vx * 3 + vy * 4} ${ey - vy * 3 - vx * 4}Z`, fill: rankColour(source) }),
      );
      svg.append(group);
    }
    ranks.forEach((rank) => {
      const [x, y] = place(rank);
      const colour = rankColour(rank);
      const group = drawn("g", { opacity: dims(rank) ? 0.3 : 1 });
      const says = drawn("text", { x, y: y + 4, "text-anchor": "middle", style: `fill:${inkOn(colour)};font-weight:600;font-size:${Math.min(12, dot)}px` });
      says.textContent = String(rank);
      group.append(drawn("circle", { cx: x, cy: y, r: dot, fill: colour }), says);
      svg.append(group);
    });
    at("wheel").replaceChildren(svg);
  };

  // ---- bars
  const drawLoads = () => {
    const here = schedule();
    const total = (way) => here[way].near.map((n, rank) => n + here[way].far[rank]);
    const chart = (title, says, forward, backward, said) => {
      const most = Math.max(1, ...forward, ...backward);
      const bar = (value, colour, name) => element("div", { class: `bar ${name}`, style: `width:${(100 * value) / most}%;background:${colour}` });
      const rows = ranks.map((rank) => element("tr", dims(rank) ? { class: "dim" } : {},
        element("td", {}, String(rank)),
        element("td", { class: "track" }, bar(forward[rank], rankColour(rank), "there"), bar(backward[rank], rankColour(rank), "back")),
        element("td", { class: "value" }, said(forward[rank])),
        element("td", { class: "value" }, said(backward[rank]))));
      const head = ["rank", "", "forward", "backward"].map((name, i) => element("th", { scope: "col", class: i > 1 ? "number" : "" }, name));
      return element("div", { class: "chart" }, element("h3", {}, title), element("p", {}, says), element("div", { class: "scroll" },
        element("table", { class: "bars" }, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))));
    };
    const far = sum(here.forward.far) + sum(here.backward.far);
    const all = sum(total("forward")) + sum(total("backward"));
    const between = data.node < data.world && all ? `${Math.round((100 * far) / all)}% of them go to another node.` : "All of them stay within the node.";
    at("loads").replaceChildren(
      chart("Operations", `${operations(sum(here.forward.flops))} forward, ${operations(sum(here.backward.flops))} backward, all ranks together.`, here.forward.flops, here.backward.flops, operations),
      chart("Bytes sent", `${bytes(all)} in all. ${all ? between : ""}`, total("forward"), total("backward"), bytes));
    at("imbalance").textContent = `The busiest rank has ${here.imbalance.toFixed(3)} times the average work; backward bars are paler.`;
  };

  // ---- timelines
  const TRACKS = ["compute", "wait", "send", "receive"];
  const drawTimelines = () => {
    const told = [schedule().timeline, ...data.timelines];
    at("timelines").replaceChildren(...told.map((one, number) => timeline(one, number)));
  };
  const timeline = (told, number) => {
    if (!told.spans.length) return element("p", { class: "none" }, `Nothing happened in ${told.name}.`);
    const width = Math.max(280, at("timelines").clientWidth);
    const rows = [...new Set(told.spans.map((span) => span[0]))].sort((a, b) => a - b);
    const [lane, left, top] = [rows.length > 16 ? 4 : 8, 44, 4];
    const tall = lane * 3 + 8;
    const end = Math.max(...told.spans.map((span) => span[4]), 1e-12);
    const x = (t) => left + ((width - left - 8) * t) / end;
    const bottom = top + rows.length * tall;
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${bottom + 24}`, height: bottom + 24, role: "img", "aria-label": `Timeline, ${told.name}` });
    const hatch = drawn("pattern", { id: `hatch-${number}`, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      drawn("rect", { width: 2, height: 5, fill: "var(--wait)" }));
    svg.append(drawn("defs", {}, hatch));
    const rough = end / Math.max(2, Math.floor(width / 130));
    const power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((m) => m * power).find((t) => t >= rough);
    for (let t = 0; t <= end; t += tick) {
      svg.append(drawn("line", { x1: x(t), x2: x(t), y1: 0, y2: bottom, stroke: "var(--line)" }));
      const label = drawn("text", { x: x(t), y: bottom + 16, "text-anchor": t ? "middle" : "start" });
      label.textContent = t ? seconds(Number(t.toPrecision(6))) : "0";
      if (x(t) < width - 24) svg.append(label);
    }
    const says = element("p", { class: "says", "aria-live": "polite" });
    rows.forEach((rank, i) => {
      const label = drawn("text", { x: 0, y: top + i * tall + lane * 1.5 + 4, opacity: dims(rank) ? 0.3 : 1 });
      label.textContent = `rank ${rank}`;
      svg.append(label);
    });
    const bars = drawn("g");
    for (const [rank, track, name, begin, stop, step, facts] of told.spans) {
      const i = rows.indexOf(rank);
      const y = top + i * tall + { compute: 0, wait: 0, send: lane + 1, receive: 2 * lane + 2 }[track];
      const off = dims(rank) || (chosen.step >= 0 && step !== null && step !== chosen.step);
      const bar = drawn("rect", { x: x(begin), y, width: Math.max(0.6, x(stop) - x(begin)), height: lane, rx: 1.5,
        fill: track === "wait" ? `url(#hatch-${number})` : `var(--${track})`, opacity: off ? 0.15 : 1 });
      const said = `Rank ${rank}, ${track}: ${name}, ${seconds(stop - begin)} from ${seconds(begin)}${facts ? ` (${facts})` : ""}.`;
      bar.append(drawn("title", {}, said));
      bar.addEventListener("pointerenter", () => { says.textContent = said; });
      bars.append(bar);
    }
    svg.append(bars);
    const of = (track) => sum(told.spans.filter((span) => span[1] === track).map((span) => span[4] - span[3]));
    const share = (time) => `${((100 * time) / (end * rows.length)).toFixed(0)}%`;
    const summary = `${seconds(end)} from start to end. On average a rank computes ${share(of("compute"))} of it and waits ${share(of("wait"))}.`
      + (told.left_out ? ` Only the first ${whole(told.spans.length)} events are drawn, ${whole(told.left_out)} follow.` : "");
    const legend = element("div", { class: "legend" }, ...TRACKS.map((track) => element("span", {},
      element("i", track === "wait" ? { class: "hatched" } : { style: `background:var(--${track})` }), track)));
    return element("div", { class: "timeline" }, element("h3", {}, told.name), element("p", {}, summary), svg, legend, says);
  };

  // ---- controls
  const fill = (select, options) => select.replaceChildren(...options.map(([value, says]) => element("option", { value }, says)));
  const headsFit = () => {
    // A step or a rank may have to do with other heads than those shown: show the first that it computes.
    const classes = headClasses();
    chosen.heads = Math.min(chosen.heads, classes.length - 1);
    const wanted = visits().filter((v) => !dims(v.rank) && (chosen.step < 0 || v.step === chosen.step));
    if (wanted.length && !wanted.some((v) => inClass(v, classes[chosen.heads]))) {
      chosen.heads = classes.findIndex((heads) => inClass(wanted[0], heads));
    }
    at("heads-field").hidden = classes.length < 2;
    fill(at("heads"), classes.map(([a, b], i) => [i, b - a === 1 ? `head ${a}` : `heads ${a} to ${b - 1}`]));
    at("heads").value = chosen.heads;
  };
  const sayStep = () => {
    const { steps } = schedule();
    const says = chosen.step < 0 ? `all ${steps.length} steps` : `step ${chosen.step + 1} of ${steps.length}: ${steps[chosen.step]}`;
    at("step").max = steps.length;
    at("step").value = chosen.step + 1;
    at("step").setAttribute("aria-valuetext", says);
    at("step-name").textContent = says[0].toUpperCase() + says.slice(1);
  };
  const draw = () => {
    sayStep();
    headsFit();
    drawStrips();
    layTiles();
    drawTiles();
    drawLegend();
    sayTile();
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

  fill(at("schedule"), data.schedules.map(({ name }) => [name, name === data.chosen ? `${name} (chosen)` : name]));
  at("schedule").value = chosen.schedule;
  fill(at("rank"), [[-1, "all ranks"], ...ranks.map((rank) => [rank, `rank ${rank}`])]);
  at("schedule").addEventListener("change", (event) => { stop(); chosen.schedule = event.target.value; chosen.step = -1; chosen.heads = 0; draw(); });
  at("rank").addEventListener("change", (event) => { chosen.rank = Number(event.target.value); draw(); });
  at("step").addEventListener("input", (event) => { stop(); chosen.step = Number(event.target.value) - 1; draw(); });
  at("heads").addEventListener("change", (event) => { chosen.heads = Number(event.target.value); layTiles(); drawTiles(); sayTile(); });
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  document.querySelectorAll("input[name=colour]").forEach((input) => input.addEventListener("change", () => {
    chosen.colour = input.value; drawTiles(); drawLegend();
  }));
  document.querySelectorAll("input[name=order]").forEach((input) => input.addEventListener("change", () => {
    chosen.order = input.value; chosen.tile = null; layTiles(); drawTiles(); sayTile();
  }));
  const ascends = data.bands.every((band, i) => !i || data.bands[i - 1][1] < band[1]);
  at("orders").hidden = data.in_turn || ascends;  // nothing to choose

  const pick = (row, column) => {
    const n = geometry.n;
    if (row < 0 || column < 0 || row >= n || column >= n) return;
    if (chosen.tile && chosen.tile[0] === row && chosen.tile[1] === column) return;
    chosen.tile = [row, column];
    drawTiles();
    sayTile();
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

  const sayTheme = () => {
    at("theme").textContent = isDark() ? "Light" : "Dark";
    at("theme").setAttribute("aria-label", isDark() ? "Switch to light colours" : "Switch to dark colours");
  };
  at("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; sayTheme(); draw(); });
  system.addEventListener("change", () => { sayTheme(); draw(); });
  sayTheme();

  let width = 0;
  new ResizeObserver(() => {
    if (canvas.clientWidth !== width) { width = canvas.clientWidth; drawTiles(); drawTimelines(); }
  }).observe(canvas);
  draw();
})();
