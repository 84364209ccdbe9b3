// What is pointed at is named, and time is stretched. All it knows it reads from the pictures: a path of class "bars"
// has one rectangle for each of its names; a plot says how long its width is.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const LETTER = 0.6;
  const make = (name, attributes) => {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };

  const timeText = (time, unit) => {
    const short = (number) => String(Number(number.toPrecision(4)));
    if (unit !== "s") return short(time);
    if (time === 0) return "0";
    const units = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
    const [scale, name] = units.find(([scale]) => Math.abs(time) >= scale) || units[3];
    return `${short(time / scale)} ${name}`;
  };

  // ---- rectangles -------------------------------------------------------------------------------------------------

  const rectangles = new WeakMap();
  const boxesOf = (path) => {
    if (!rectangles.has(path)) {
      const names = path.dataset.names.split("|");
      const found = path.getAttribute("d").matchAll(/M(\S+) (\S+?)h([\d.]+)v([\d.]+)/g);
      rectangles.set(path, Array.from(found, ([, x, y, width, height], index) => (
        { x: +x, y: +y, width: +width, height: +height, name: names[index], path }
      )));
    }
    return rectangles.get(path);
  };

  const sheetAt = (picture, target) => target.closest(".plot") || picture;
  const within = (sheet, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(sheet.getScreenCTM().inverse());
  const named = (sheet) => Array.from(sheet.querySelectorAll("path[data-names]"))
    .filter((path) => path.ownerSVGElement === sheet);

  // What is drawn last lies on top; where nothing is, what is very near will do.
  const boxAt = (sheet, point) => {
    const slack = sheet.classList.contains("plot") ? 1.5 * sheet.viewBox.baseVal.width / sheet.width.baseVal.value : 0;
    const near = [];
    for (const path of named(sheet).reverse()) {
      for (const box of boxesOf(path)) {
        if (point.y < box.y || point.y > box.y + box.height) continue;
        const away = Math.max(box.x - point.x, point.x - box.x - box.width, 0);
        if (away === 0) return box;
        if (away <= slack) near.push({ away, box });
      }
    }
    return near.sort((one, other) => one.away - other.away)[0]?.box;
  };

  // ---- what is shown -----------------------------------------------------------------------------------------------

  const note = document.createElement("div");
  note.id = "note";
  note.hidden = true;
  note.setAttribute("role", "status");
  document.body.append(note);
  let picked = null;

  const forget = () => {
    note.hidden = true;
    if (picked) picked.remove();
    picked = null;
  };

  const showNote = (sheet, box, x, y) => {
    forget();
    picked = make("rect", { class: "pick", x: box.x, y: box.y, width: box.width, height: box.height });
    sheet.append(picked);
    const lines = [box.path.dataset.row];
    if (sheet.dataset.span) {
      const scale = sheet.dataset.span / sheet.width.baseVal.value;
      lines.push(`from ${timeText(box.x * scale, sheet.dataset.unit)} for ${timeText(box.width * scale, sheet.dataset.unit)}`);
    }
    note.replaceChildren(Object.assign(document.createElement("b"), { textContent: box.name }), lines.filter(Boolean).join(", "));
    note.hidden = false;
    const size = note.getBoundingClientRect();
    note.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - size.width - 8))}px`;
    note.style.top = `${y + 18 + size.height > innerHeight ? y - size.height - 10 : y + 18}px`;
  };

  // ---- time, stretched --------------------------------------------------------------------------------------------

  const ticks = (start, span, most) => {
    const power = 10 ** Math.floor(Math.log10(span / most));
    const step = [1, 2, 5, 10, 20].map((factor) => factor * power).find((step) => span / step <= most);
    const first = Math.ceil(start / step - 1e-9);
    return Array.from({ length: Math.floor((start + span) / step + 1e-9) - first + 1 }, (_, index) => (first + index) * step);
  };

  const redraw = (plot, start, part) => {
    const width = plot.width.baseVal.value, height = plot.height.baseVal.value, all = Number(plot.dataset.span);
    plot.classList.toggle("near", part < 0.2);
    plot.setAttribute("viewBox", `${start * width} 0 ${part * width} ${height}`);
    const axis = plot.previousElementSibling, texts = plot.nextElementSibling;
    const place = (x) => (x / width - start) / part * width;
    axis.replaceChildren();
    for (const time of ticks(start * all, part * all, 10)) {
      const x = place(time / all * width);
      axis.append(make("path", { class: "line grid", d: `M${x} 0L${x} ${height + 4}` }));
      const text = make("text", { class: "faint", x, y: height + 13, "font-size": 10, "text-anchor": "middle" });
      text.textContent = timeText(time, plot.dataset.unit);
      axis.append(text);
    }
    if (!texts.dataset.size) return;
    const size = Number(texts.dataset.size), drawn = [];
    for (const path of named(plot).filter((path) => path.matches(".forward,.backward,.input,.weights,.forward-2,.backward-2,.input-2,.weights-2"))) {
      for (const box of boxesOf(path)) {
        const left = Math.max(0, place(box.x)), right = Math.min(width, place(box.x + box.width));
        const name = "brief" in plot.dataset ? box.name.replace(/^\d+/, "") : box.name;
        if (right - left <= LETTER * size * name.length + 2) continue;
        const text = make("text", { class: "inside", x: (left + right) / 2, y: box.y + box.height / 2, "font-size": size, "text-anchor": "middle" });
        text.textContent = name;
        drawn.push(text);
      }
    }
    texts.replaceChildren(...drawn);
  };

  class View {
    constructor(section) {
      this.plots = Array.from(section.querySelectorAll(".plot"));
      [this.start, this.part] = [0, 1];
      for (const plot of this.plots) {
        const texts = plot.nextElementSibling;
        if (texts.firstElementChild) texts.dataset.size = texts.firstElementChild.getAttribute("font-size");
      }
      const bar = Object.assign(document.createElement("div"), { className: "bar" });
      const button = (text, label, act) => {
        const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, onclick: act });
        made.setAttribute("aria-label", label);
        bar.append(made);
      };
      button("+", "stretch time", () => this.zoom(0.5));
      button("−", "shrink time", () => this.zoom(2));
      button("←", "earlier", () => this.show(this.start - this.part / 3, this.part));
      button("→", "later", () => this.show(this.start + this.part / 3, this.part));
      button("all", "the whole step", () => this.show(0, 1));
      bar.append(Object.assign(document.createElement("span"), { textContent: "or drag across a timeline; keys: arrows, + − 0" }));
      section.querySelector("h2").after(bar);
    }

    show(start, part) {
      forget();
      this.part = Math.min(1, Math.max(1e-5, part));
      this.start = Math.min(1 - this.part, Math.max(0, start));
      for (const plot of this.plots) redraw(plot, this.start, this.part);
    }

    zoom(factor, at = 0.5) {
      const part = Math.min(1, this.part * factor);
      this.show(this.start + at * (this.part - part), part);
    }

    reveal(plot, box) {
      const width = plot.width.baseVal.value, left = box.x / width, right = (box.x + box.width) / width;
      if (left < this.start || right > this.start + this.part) this.show((left + right - this.part) / 2, this.part);
    }
  }

  // ---- by mouse and by keys ---------------------------------------------------------------------------------------

  const dragging = (view, plot, picture) => {
    let from = null, range = null;
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      from = within(plot, event).x;
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointermove", (event) => {
      if (from === null) return;
      forget();
      const x = within(plot, event).x;
      if (!range) plot.append(range = make("rect", { class: "range", y: 0, height: plot.height.baseVal.value }));
      range.setAttribute("x", Math.min(x, from));
      range.setAttribute("width", Math.abs(x - from));
      event.stopPropagation();
    });
    plot.addEventListener("pointerup", (event) => {
      const x = within(plot, event).x, width = plot.width.baseVal.value;
      if (range && Math.abs(x - from) > 4 * view.part) view.show(Math.min(x, from) / width, Math.abs(x - from) / width);
      if (range) range.remove();
      from = range = null;
    });
    plot.addEventListener("dblclick", () => view.show(0, 1));
    plot.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      view.zoom(1.2 ** (event.deltaY / 60), (within(plot, event).x / plot.width.baseVal.value - view.start) / view.part);
    }, { passive: false });
    picture.addEventListener("keydown", (event) => {
      const acts = { "+": () => view.zoom(0.5), "=": () => view.zoom(0.5), "-": () => view.zoom(2), 0: () => view.show(0, 1) };
      if (acts[event.key] && !event.ctrlKey && !event.metaKey) acts[event.key]();
    });
  };

  const walking = (picture, view) => {
    const sheet = picture.querySelector(".plot") || picture;
    let rows = null, row = 0, place = 0;
    const gather = () => {
      const lines = new Map();
      for (const box of named(sheet).flatMap(boxesOf)) {
        if (!lines.has(box.y)) lines.set(box.y, []);
        lines.get(box.y).push(box);
      }
      rows = [...lines.keys()].sort((one, other) => one - other).map((y) => lines.get(y).sort((one, other) => one.x - other.x));
    };
    picture.addEventListener("keydown", (event) => {
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (event.key === "Escape") forget();
      if (!step) return;
      event.preventDefault();
      if (!rows) [place, row] = [gather() ?? -step[1], 0];
      const near = rows[row][place]?.x ?? 0;
      row = Math.min(rows.length - 1, Math.max(0, row + step[0]));
      if (step[0]) place = rows[row].reduce((best, box, index) => (Math.abs(box.x - near) < Math.abs(rows[row][best].x - near) ? index : best), 0);
      place = Math.min(rows[row].length - 1, Math.max(0, place + step[1]));
      const box = rows[row][place];
      if (view) view.reveal(sheet, box);
      const at = new DOMPoint(box.x + box.width / 2, box.y + box.height).matrixTransform(sheet.getScreenCTM());
      showNote(sheet, box, at.x, at.y - 10);
    });
    picture.addEventListener("blur", forget);
  };

  for (const section of document.querySelectorAll("section")) {
    const view = section.matches(".plan") && section.querySelector(".plot") ? new View(section) : null;
    for (const picture of section.querySelectorAll("svg.picture")) {
      picture.setAttribute("tabindex", "0");
      for (const plot of picture.querySelectorAll(".plot")) dragging(view, plot, picture);
      walking(picture, view);
      picture.addEventListener("pointermove", (event) => {
        const sheet = sheetAt(picture, event.target), box = boxAt(sheet, within(sheet, event));
        if (box) showNote(sheet, box, event.clientX, event.clientY);
        else forget();
      });
      picture.addEventListener("pointerleave", forget);
    }
  }
})();
