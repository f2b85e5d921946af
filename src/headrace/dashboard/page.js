/* What the page does in the browser. */

function switchTheme() {
  const dark = !document.body.classList.contains('body--dark');
  Quasar.Dark.set(dark);
  document.cookie = 'headrace_theme=' + (dark ? 'dark' : 'light') + '; path=/; max-age=31536000; SameSite=Strict';
}

/* Cells are texts such as "1,608", "36.6 k" or "5 min ago": their numbers decide, else their letters. A row may give
   another number instead. What has none is below all others. */
function inOrder(a, b, numberA, numberB) {
  const units = {k: 1e3, M: 1e6, G: 1e9, min: 60, h: 3600, days: 86400};
  const value = (text, number) => {
    if (number !== undefined) return number === null ? NaN : number;
    const found = String(text).replace(/,/g, '').match(/^[$]?(-?[\d.]+)\s*([a-zA-Z]*)/);
    return found ? parseFloat(found[1]) * (units[found[2]] || 1) : NaN;
  };
  const x = value(a, numberA), y = value(b, numberB);
  if (isNaN(x) && isNaN(y)) return String(a).localeCompare(String(b));
  return isNaN(x) ? -1 : isNaN(y) ? 1 : x - y;
}

/* A bar of the timeline: where its lane and its seconds are. */
function drawBar(params, api) {
  const start = api.coord([api.value(1), api.value(0)]), end = api.coord([api.value(2), api.value(0)]);
  const height = api.size([0, 1])[1] * 0.6, area = params.coordSys, last = area.x + area.width;
  const left = Math.max(start[0], area.x), right = Math.min(Math.max(end[0], start[0] + 1), last);
  return right <= left ? null : {type: 'rect', style: api.style(),
    shape: {x: left, y: start[1] - height / 2, width: right - left, height: height}};
}

/* Numbers beside an axis, and in a tooltip. */
function briefly(v) {
  return Math.abs(v) >= 1e6 ? v / 1e6 + ' M' : Math.abs(v) >= 1e3 ? v / 1e3 + ' k' : v;
}

function fewDigits(v) {
  return v == null ? '-' : Number(v.toPrecision(4)).toLocaleString('en');
}
