/** One tip for many things, beside whatever is pointed at or focused. What it says is said elsewhere too, for those who see none. */
import { fill, h } from './element.js';

const GAP = 8;

export function tooltip() {
  const element = h('div', { class: 'tip', hidden: true, 'aria-hidden': 'true' });
  document.body.append(element);
  return {
    /** @param {Element} beside @param {...import('./element.js').Child} content */
    show(beside, ...content) {
      fill(element, ...content);
      element.hidden = false;
      const at = beside.getBoundingClientRect();
      const { width, height } = element.getBoundingClientRect();
      const left = Math.max(GAP, Math.min(innerWidth - width - GAP, at.left + at.width / 2 - width / 2));
      const above = at.top - height - GAP;
      const top = above > GAP ? above : at.bottom + GAP;
      element.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
    },
    hide() {
      element.hidden = true;
    },
    end() {
      element.remove();
    },
  };
}
