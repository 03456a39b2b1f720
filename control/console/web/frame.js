/** What stands around every view: where one can go, how the cluster is, who is logged in. */
import { fill, h, setText } from './dom/element.js';
import { icon } from './dom/icons.js';
import { count } from './format/amounts.js';
import { onTheme, theme, toggleTheme } from './state/theme.js';

/** @type {readonly { view: string, title: string, icon: import('./dom/icons.js').IconName }[]} */
const PLACES = [
  { view: 'nodes', title: 'Nodes', icon: 'nodes' },
  { view: 'sandboxes', title: 'Sandboxes', icon: 'sandboxes' },
  { view: 'images', title: 'Images', icon: 'images' },
  { view: 'projects', title: 'Projects', icon: 'projects' },
  { view: 'denied', title: 'Denied', icon: 'denied' },
  { view: 'audit', title: 'Audit', icon: 'audit' },
];

/** @param {import('./main.js').Context} context @param {() => void} logOut */
export function frame({ who, cluster }, logOut) {
  const main = h('main', { id: 'main', tabindex: -1 });
  const links = PLACES.map(({ view, title, icon: name }) =>
    h('a', { href: `#/${view}`, class: 'nav-link', 'data-view': view }, icon(name), h('span', null, title)),
  );
  const pulse = h('span', { class: 'pulse', role: 'status' });
  const themeButton = h('button', { class: 'icon-button', type: 'button', on: { click: toggleTheme } });
  const drawTheme = () => {
    const other = theme() === 'dark' ? 'light' : 'dark';
    themeButton.setAttribute('aria-label', `Show in ${other} colours`);
    themeButton.title = `Show in ${other} colours`;
    fill(themeButton, icon(other === 'light' ? 'sun' : 'moon'));
  };
  drawTheme();
  const out = {
    class: 'icon-button',
    type: 'button',
    'aria-label': 'Log out',
    title: 'Log out',
    on: { click: () => logOut() },
  };
  const name = who.principal ?? 'unknown';
  const header = h(
    'header',
    { class: 'top' },
    h('a', { href: '#/nodes', class: 'brand', 'aria-label': 'DSec' }, h('span', { class: 'brand-mark' }), 'DSec'),
    h('nav', { class: 'nav', 'aria-label': 'Views' }, ...links),
    pulse,
    h('span', { class: 'who', title: who.project ? `${name} in ${who.project}` : name }, name),
    themeButton,
    h('button', out, icon('out')),
  );
  const drawPulse = () => {
    const { nodes, live, errors, nodesDenied } = cluster;
    const away = (errors.nodes !== undefined && !nodesDenied) || errors.sandboxes !== undefined;
    const text = away ? 'server away' : live ? 'live' : 'polling';
    pulse.className = `pulse ${away ? 'pulse-bad' : live ? 'pulse-good' : 'pulse-warn'}`;
    setText(pulse, nodes === undefined ? text : `${count(nodes.length)} nodes · ${text}`);
    pulse.title = live ? 'Changes are shown as they happen' : 'No stream of events: asked for every few seconds';
  };
  const ends = [
    onTheme(drawTheme),
    cluster.statusTopic.subscribe(drawPulse),
    cluster.nodesTopic.subscribe(drawPulse),
    cluster.sandboxesTopic.subscribe(drawPulse),
  ];
  drawPulse();
  // The page's own address would take the view's place.
  const skip = h('button', { class: 'skip', type: 'button', on: { click: () => main.focus() } }, 'Skip to content');
  return {
    element: h('div', { class: 'frame' }, skip, header, main),
    /** @param {HTMLElement} view @param {string} current */
    show(view, current) {
      for (const link of links) {
        if (link.dataset.view === current) link.setAttribute('aria-current', 'page');
        else link.removeAttribute('aria-current');
      }
      fill(main, view);
      main.scrollTop = 0;
    },
    end() {
      for (const end of ends) end();
    },
  };
}
