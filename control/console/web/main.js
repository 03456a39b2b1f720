/** The page: log in, then the frame with one view in it. A view is a function that is given the session and a place, and returns an element and its end. */
import { fill, h } from './dom/element.js';
import { failure } from './dom/notices.js';
import { frame } from './frame.js';
import { placeOf } from './router.js';
import { Cluster } from './state/cluster.js';
import { forgetToken, keptToken, openSession } from './state/session.js';
import { auditView } from './views/audit.js';
import { deniedView } from './views/denied.js';
import { imageView } from './views/image.js';
import { imagesView } from './views/images.js';
import { loginView } from './views/login.js';
import { nodesView } from './views/nodes.js';
import { projectsView } from './views/projects.js';
import { sandboxView } from './views/sandbox.js';
import { sandboxesView } from './views/sandboxes.js';

/** @typedef {import('./state/session.js').Session & { cluster: Cluster }} Context */
/** @typedef {{ element: HTMLElement, end?: () => void, title: string }} View */
/** @typedef {(context: Context, place: import('./router.js').Place) => View} MakeView */

/** @type {Record<string, { list: MakeView, one?: MakeView }>} */
const VIEWS = {
  nodes: { list: nodesView },
  sandboxes: { list: sandboxesView, one: sandboxView },
  images: { list: imagesView, one: imageView },
  projects: { list: projectsView },
  denied: { list: deniedView },
  audit: { list: auditView },
};

const app = /** @type {HTMLElement} */ (document.getElementById('app'));
/** @type {(() => void) | undefined} */
let leave;

/** @param {import('./state/session.js').Session} session */
function enter(session) {
  const cluster = new Cluster(session.api);
  const context = { ...session, cluster };
  const around = frame(context, logOut);
  /** @type {View | undefined} */
  let view;
  const show = () => {
    view?.end?.();
    const place = placeOf(location.hash);
    const known = Object.hasOwn(VIEWS, place.view) ? VIEWS[place.view] : undefined;
    const make = (place.name === undefined ? undefined : known?.one) ?? known?.list ?? nodesView;
    try {
      view = make(context, place);
    } catch (error) {
      view = { element: failure(error), title: 'Error' };
    }
    document.title = `${view.title} · DSec`;
    around.show(view.element, place.view);
  };
  cluster.start();
  addEventListener('hashchange', show);
  leave = () => {
    removeEventListener('hashchange', show);
    view?.end?.();
    around.end();
    cluster.end();
  };
  fill(app, around.element);
  show();
}

/** @param {string} [reason] */
function logOut(reason) {
  forgetToken();
  leave?.();
  leave = undefined;
  document.title = 'DSec';
  fill(app, loginView(logIn, reason));
}

/** @param {string} token @throws ApiError */
async function logIn(token) {
  enter(await openSession(token, () => logOut('The token is not valid any more: it has expired or was revoked.')));
}

const kept = keptToken();
if (kept === undefined) logOut();
else {
  fill(app, h('div', { class: 'opening', role: 'status' }, 'Opening'));
  try {
    await logIn(kept);
  } catch (error) {
    // A server that is away for a moment is no reason to ask for the token again.
    const { status } = /** @type {any} */ (error);
    if (status === 401 || status === 403) logOut('The token is not valid any more: it has expired or was revoked.');
    else
      fill(
        app,
        failure(error, () => location.reload()),
      );
  }
}
