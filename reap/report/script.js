"use strict";
(() => {
  const body = document.body;
  body.dataset.errors = "0";
  window.addEventListener("error", () => {
    body.dataset.errors = String(Number(body.dataset.errors) + 1);
  });

  // Titles become one tooltip that shows at once; without scripts the browser shows them itself.
  const tip = document.getElementById("tip");
  for (const title of document.querySelectorAll("svg title")) {
    const mark = title.parentNode;
    if (mark.tagName !== "svg") mark.dataset.tip = title.textContent;
    title.remove();
  }
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.style.visibility = "visible";
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - box.width - 6))}px`;
    tip.style.top = `${y + box.height + 24 > innerHeight ? y - box.height - 12 : y + 16}px`;
  };
  const hide = () => { tip.style.visibility = "hidden"; };
  document.addEventListener("pointermove", (event) => {
    if (event.target === canvas) return;
    const mark = event.target.closest && event.target.closest("[data-tip]");
    if (mark) show(mark.dataset.tip, event.clientX, event.clientY);
    else hide();
  });
  document.addEventListener("scroll", hide, { passive: true });

  const data = JSON.parse(document.getElementById("map-data").textContent);
  const unpack = (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Uint16Array.from({ length: bytes.length / 2 }, (_, i) => view.getUint16(2 * i, true));
  };
  const cells = unpack(data.cells);
  const saliency = unpack(data.saliency);
  const share = unpack(data.share);
  const [experts, layers] = [data.experts, data.layers.length];
  // Position in the arrays of expert id i of layer l.
  const byId = new Uint16Array(layers * experts);
  for (let l = 0; l < layers; l++) {
    for (let r = 0; r < experts; r++) byId[l * experts + (cells[l * experts + r] & 16383)] = r;
  }
  const value = (code, [low, high]) =>
    code === 0 ? 0 : 10 ** (low + ((code - 1) / 65534) * (high - low));
  const digits = (number) => (number === 0 ? "0" : number.toPrecision(3));

  const canvas = document.getElementById("map");
  const cellText = document.getElementById("cell");
  const gutter = 40;
  const footer = 22;
  let order = "rank";
  let size = null;
  let cursor = null;

  const at = (layer, column) =>
    layer * experts + (order === "rank" ? column : byId[layer * experts + column]);
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const colors = ["--dropped", "--low", "--high"].map(color);
    const room = canvas.parentNode.clientWidth;
    const width = Math.max(room, gutter + experts);
    const row = Math.max(4, Math.min(26, Math.floor(420 / layers)));
    const ratio = window.devicePixelRatio || 1;
    const height = row * layers + footer;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pitch = (width - gutter) / experts;
    size = { row, pitch };
    const context = canvas.getContext("2d");
    const gapX = pitch >= 6 ? 1 : 0;
    const gapY = row >= 6 ? 1 : 0;
    for (let l = 0; l < layers; l++) {
      const y0 = Math.round(l * row * ratio);
      const y1 = Math.round(((l + 1) * row - gapY) * ratio);
      for (let c = 0; c < experts; c++) {
        const x0 = Math.round((gutter + c * pitch) * ratio);
        const x1 = Math.round((gutter + (c + 1) * pitch - gapX) * ratio);
        context.fillStyle = colors[cells[at(l, c)] >> 14];
        context.fillRect(x0, y0, Math.max(1, x1 - x0), y1 - y0);
      }
    }
    context.scale(ratio, ratio);
    context.fillStyle = color("--soft");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "right";
    const every = Math.ceil(14 / row);
    for (let l = 0; l < layers; l += every) {
      context.fillText(String(data.layers[l]), gutter - 8, l * row + Math.max(row / 2 + 4, 9));
    }
    context.textAlign = "left";
    const left = order === "rank" ? "most salient" : "expert 0";
    const right = order === "rank" ? "least salient" : `expert ${experts - 1}`;
    context.fillText(left, gutter, height - 6);
    context.textAlign = "right";
    context.fillText(right, width, height - 6);
    if (cursor) {
      const [layer, column] = cursor;
      context.strokeStyle = color("--ink");
      context.lineWidth = 1.5;
      context.strokeRect(gutter + column * pitch - 1, layer * row - 1, Math.max(pitch, 3) + 1, row + 1);
    }
  };
  const describe = (layer, column) => {
    const index = at(layer, column);
    const rank = order === "rank" ? column : byId[layer * experts + column];
    return `Layer ${data.layers[layer]}, expert ${cells[index] & 16383}: ` +
      `${data.states[cells[index] >> 14]}; saliency ${digits(value(saliency[index], data.saliencyRange))} ` +
      `(rank ${rank + 1} of ${experts}); chosen by ` +
      `${digits(100 * value(share[index], data.shareRange))} % of tokens`;
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - gutter) / size.pitch);
    const layer = Math.floor((event.clientY - box.top) / size.row);
    if (column < 0 || column >= experts || layer < 0 || layer >= layers) { hide(); return; }
    show(describe(layer, column), event.clientX, event.clientY);
  });
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [layer, column] = cursor || [0, -step[1]];
    cursor = [
      Math.max(0, Math.min(layers - 1, layer + (cursor ? step[0] : 0))),
      Math.max(0, Math.min(experts - 1, column + step[1])),
    ];
    draw();
    cellText.textContent = describe(...cursor);
  });
  canvas.addEventListener("blur", () => { cursor = null; draw(); });
  for (const input of document.querySelectorAll("input[name=order]")) {
    input.addEventListener("change", () => { order = input.value; draw(); });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("beforeprint", () => { document.documentElement.dataset.print = ""; draw(); });
  window.addEventListener("afterprint", () => { delete document.documentElement.dataset.print; draw(); });
  let width = 0;
  new ResizeObserver(() => {
    if (canvas.parentNode.clientWidth === width) return;
    width = canvas.parentNode.clientWidth;
    draw();
  }).observe(canvas.parentNode);
  draw();
  body.dataset.ready = `${cells.length} cells`;
})();
