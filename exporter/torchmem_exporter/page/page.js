// Follows the ranks: asks for the page again and changes only what differs, so that focus, scrolling, a selection and
// open details stay. Without scripts the page says the same and is loaded anew now and then.
(() => {
  const news = () => document.getElementById("news");
  const keyOf = (node) => (node.nodeType === 1 && node.dataset ? node.dataset.k : undefined);
  const isAlike = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);

  function takeAttributes(now, next) {
    for (const { name } of [...now.attributes]) {
      if (!next.hasAttribute(name) && !(name === "open" && now.nodeName === "DETAILS")) now.removeAttribute(name);
    }
    for (const { name, value } of next.attributes) {
      if (now.getAttribute(name) !== value) now.setAttribute(name, value);
    }
  }

  function take(now, next) {
    if (now.nodeType !== 1) {
      if (now.data !== next.data) now.data = next.data;
      return;
    }
    if (now.id === "news" || now.nodeName === "SCRIPT") return;
    takeAttributes(now, next);
    takeChildren(now, next);
  }

  function takeChildren(now, next) {
    const kept = new Set([...next.childNodes].map(keyOf).filter((key) => key !== undefined));
    let child = now.firstChild;
    const pass = () => {
      const passed = child;
      child = child.nextSibling;
      return passed;
    };
    for (const wanted of [...next.childNodes]) {
      while (child && keyOf(child) !== undefined && !kept.has(keyOf(child))) pass().remove();
      if (child && isAlike(child, wanted)) {
        take(pass(), wanted);
        continue;
      }
      let found = child;
      while (found && !(keyOf(wanted) !== undefined && isAlike(found, wanted))) found = found.nextSibling;
      now.insertBefore(found || wanted, child);
      if (found) take(found, wanted);
    }
    while (child) pass().remove();
  }

  async function look() {
    const asked = location.pathname + location.search;
    try {
      const answer = await fetch(asked, { cache: "no-store", signal: AbortSignal.timeout(10000) });
      if (!(answer.headers.get("content-type") || "").startsWith("text/html")) throw new Error(answer.status);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (asked !== location.pathname + location.search) return;
      const focused = document.activeElement;
      document.title = next.title;
      take(document.body, next.body);
      if (focused && focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
      news().textContent = "";
    } catch {
      news().textContent = "The sidecar does not answer: what is shown is old.";
    }
  }

  // The address says it from the click on, what is shown only once the sidecar has answered.
  const isPaused = () => new URLSearchParams(location.search).get("live") === "off";

  async function follow() {
    const seconds = Number(document.body.dataset.seconds);
    if (seconds && !document.hidden && !isPaused()) await look();
    setTimeout(follow, 1000 * (seconds || 1));
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("#toggle");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    history.replaceState(null, "", link.getAttribute("href") + location.hash);
    look();
  });
  setTimeout(follow, 1000 * (Number(document.body.dataset.seconds) || 1));
})();
