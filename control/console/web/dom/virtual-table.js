/**
 * A table of any number of rows of which only those in sight are elements. Rows are of one height and are used again as the view moves; columns
 * that do not fit are left out, the least important first. One row is the current one: arrows move it, Enter opens it.
 */
import { fill, h, setText } from './element.js';

/**
 * @template Row
 * @typedef {object} Column
 * @property {string} key
 * @property {string} title
 * @property {number} width Pixels at least.
 * @property {number} [grow] Share of what is left over.
 * @property {number} [priority] Higher goes first when there is no room; 0 never goes.
 * @property {'end'} [align]
 * @property {boolean} [mono]
 * @property {(row: Row) => string | number | undefined} [sort]
 * @property {(row: Row) => string | number} [text]
 * @property {(cell: HTMLElement, row: Row) => void} [show] In place of `text`.
 */
/**
 * @template Row
 * @typedef {object} TableOptions
 * @property {string} label
 * @property {readonly Column<Row>[]} columns
 * @property {(row: Row) => string} keyOf
 * @property {(row: Row) => void} [open]
 * @property {{ key: string, down: boolean }} [sort]
 * @property {HTMLElement} [whenEmpty]
 */

const ROW_HEIGHT = 34;
const OVERSCAN = 6;
const PADDING = 24;

/** @template Row */
export class VirtualTable {
  /** @param {TableOptions<Row>} options */
  constructor(options) {
    this.options = options;
    /** @type {readonly Row[]} */
    this.given = [];
    /** @type {Row[]} */
    this.rows = [];
    this.sort = options.sort;
    /** @type {string | undefined} */
    this.current = undefined;
    /** @type {readonly Column<Row>[]} */
    this.columns = options.columns;
    /** @type {{ element: HTMLElement, cells: HTMLElement[], index: number }[]} */
    this.pool = [];
    this.id = `table-${Math.random().toString(36).slice(2, 8)}`;
    this.head = h('div', { class: 'vt-head', role: 'row' });
    this.body = h('div', { class: 'vt-body', role: 'rowgroup' });
    this.scroller = h(
      'div',
      {
        class: 'vt',
        role: 'grid',
        tabindex: 0,
        'aria-label': options.label,
        on: {
          scroll: () => this.#draw(),
          keydown: (event) => this.#key(event),
          click: (event) => this.#click(event),
        },
      },
      h('div', { role: 'rowgroup', class: 'vt-headgroup' }, this.head),
      this.body,
    );
    this.emptySlot = h('div', { class: 'vt-empty', hidden: true }, options.whenEmpty);
    this.element = h('div', { class: 'vt-frame' }, this.scroller, this.emptySlot);
    this.observer = new ResizeObserver(() => this.#resized());
    this.observer.observe(this.scroller);
    this.#layout();
  }

  end() {
    this.observer.disconnect();
  }

  /** @param {readonly Row[]} rows */
  setRows(rows) {
    this.given = rows;
    this.#sortRows();
    this.emptySlot.hidden = rows.length > 0;
    this.scroller.setAttribute('aria-rowcount', String(rows.length + 1));
    this.body.style.height = `${rows.length * ROW_HEIGHT}px`;
    this.#draw();
  }

  /** What is in sight once more: rows may say something else by now. */
  redraw() {
    this.#draw();
  }

  #sortRows() {
    const { sort } = this;
    const column = this.options.columns.find(({ key }) => key === sort?.key);
    if (column?.sort === undefined || sort === undefined) {
      this.rows = [...this.given];
      return;
    }
    const sortedBy = column.sort;
    const keyed = this.given.map((row) => ({ row, value: sortedBy(row) }));
    const factor = sort.down ? -1 : 1;
    keyed.sort((a, b) => compare(a.value, b.value, factor));
    this.rows = keyed.map(({ row }) => row);
  }

  #resized() {
    this.#layout();
    this.#draw();
  }

  #layout() {
    const room = (this.scroller.clientWidth || 1200) - PADDING;
    let columns = [...this.options.columns];
    const width = () => columns.reduce((all, column) => all + column.width, 0);
    while (width() > room) {
      const least = columns.reduce((a, b) => ((b.priority ?? 0) >= (a.priority ?? 0) ? b : a));
      if ((least.priority ?? 0) === 0) break;
      columns = columns.filter((column) => column !== least);
    }
    const same = this.head.childElementCount > 0 && columns.length === this.columns.length;
    if (same && columns.every((column, i) => column === this.columns[i])) return;
    this.columns = columns;
    const tracks = columns.map(({ width, grow }) => (grow ? `minmax(${width}px, ${grow}fr)` : `${width}px`));
    this.scroller.style.setProperty('--tracks', tracks.join(' '));
    this.scroller.setAttribute('aria-colcount', String(columns.length));
    this.#drawHead();
    this.pool = [];
    this.body.replaceChildren();
  }

  #drawHead() {
    const heads = this.columns.map((column) => {
      const sorted = this.sort?.key === column.key ? (this.sort.down ? 'descending' : 'ascending') : undefined;
      const label = h('span', null, column.title);
      const classes = `vt-th${column.align === 'end' ? ' end' : ''}`;
      if (column.sort === undefined) return h('div', { class: classes, role: 'columnheader' }, label);
      const sortBy = () => this.#sortBy(column);
      const button = h('button', { type: 'button', class: 'vt-sort', on: { click: sortBy } }, label);
      return h('div', { class: classes, role: 'columnheader', 'aria-sort': sorted ?? 'none' }, button);
    });
    fill(this.head, ...heads);
  }

  /** @param {Column<Row>} column */
  #sortBy({ key }) {
    const same = this.sort?.key === key;
    this.sort = { key, down: same ? !this.sort?.down : false };
    const index = this.columns.findIndex((column) => column.key === key);
    this.#drawHead();
    this.setRows(this.given);
    /** @type {HTMLElement | null | undefined} */ (this.head.children[index]?.querySelector('button'))?.focus();
  }

  #draw() {
    const { scrollTop, clientHeight } = this.scroller;
    const first = Math.max(0, Math.floor(scrollTop / ROW_HEIGHT) - OVERSCAN);
    const last = Math.min(this.rows.length, Math.ceil((scrollTop + (clientHeight || 600)) / ROW_HEIGHT) + OVERSCAN);
    const needed = Math.max(0, last - first);
    while (this.pool.length < needed) this.pool.push(this.#newRow());
    this.pool.forEach((slot, i) => {
      if (i >= needed) {
        slot.element.hidden = true;
        return;
      }
      // The same row stays in the same element while it is in sight: focus and selections of text live on.
      const index = first + ((i - (first % needed) + needed) % needed);
      this.#drawRow(slot, index);
    });
    const current = this.pool.find(({ element }) => !element.hidden && element.classList.contains('current'));
    if (current === undefined) this.scroller.removeAttribute('aria-activedescendant');
    else this.scroller.setAttribute('aria-activedescendant', current.element.id);
  }

  #newRow() {
    const cells = this.columns.map(({ align, mono }) =>
      h('div', { class: `vt-td${align === 'end' ? ' end' : ''}${mono ? ' mono' : ''}`, role: 'gridcell' }),
    );
    const element = h('div', { class: 'vt-row', role: 'row', id: `${this.id}-${this.pool.length}` }, ...cells);
    this.body.append(element);
    return { element, cells, index: -1 };
  }

  /** @param {{ element: HTMLElement, cells: HTMLElement[], index: number }} slot @param {number} index */
  #drawRow(slot, index) {
    const row = /** @type {Row} */ (this.rows[index]);
    const { element, cells } = slot;
    slot.index = index;
    element.hidden = false;
    element.style.transform = `translateY(${index * ROW_HEIGHT}px)`;
    element.setAttribute('aria-rowindex', String(index + 2));
    const current = this.options.keyOf(row) === this.current;
    element.classList.toggle('current', current);
    element.setAttribute('aria-selected', String(current));
    this.columns.forEach((column, i) => {
      const cell = /** @type {HTMLElement} */ (cells[i]);
      if (column.show !== undefined) column.show(cell, row);
      else setText(cell, column.text?.(row) ?? '');
    });
  }

  /** @param {MouseEvent} event */
  #click(event) {
    const element = /** @type {Element} */ (event.target).closest('.vt-row');
    const slot = this.pool.find((one) => one.element === element);
    // Text that was marked is wanted, not the row.
    if (slot === undefined || String(getSelection()) !== '') return;
    this.#go(slot.index);
    this.#open();
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.target !== this.scroller) return;
    const at = this.rows.findIndex((row) => this.options.keyOf(row) === this.current);
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / ROW_HEIGHT) - 2);
    const last = this.rows.length - 1;
    const to = /** @type {Record<string, number>} */ ({
      ArrowDown: at + 1,
      ArrowUp: at < 0 ? 0 : at - 1,
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: last,
    })[event.key];
    if (to !== undefined) {
      event.preventDefault();
      this.#go(Math.max(0, Math.min(last, to)));
    } else if (event.key === 'Enter') this.#open();
  }

  /** @param {number} index */
  #go(index) {
    const row = this.rows[index];
    if (row === undefined) return;
    this.current = this.options.keyOf(row);
    const top = index * ROW_HEIGHT;
    const { scrollTop, clientHeight } = this.scroller;
    const visible = clientHeight - this.head.offsetHeight;
    if (top < scrollTop) this.scroller.scrollTop = top;
    else if (top + ROW_HEIGHT > scrollTop + visible) this.scroller.scrollTop = top + ROW_HEIGHT - visible;
    this.#draw();
  }

  #open() {
    const row = this.rows.find((one) => this.options.keyOf(one) === this.current);
    if (row !== undefined) this.options.open?.(row);
  }
}

/** Those without a value stand at the end, whichever way. @param {string | number | undefined} a @param {string | number | undefined} b @param {number} factor */
function compare(a, b, factor) {
  if (a === b) return 0;
  if (a === undefined || a === '') return 1;
  if (b === undefined || b === '') return -1;
  if (typeof a === 'number' && typeof b === 'number') return (a - b) * factor;
  return (String(a) < String(b) ? -1 : 1) * factor;
}
