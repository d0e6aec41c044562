// All that the page cannot do without a script: the contents close behind a link, and show where the reader is.
const contents = document.querySelector("#contents");
contents.onclick = event => {
  if (event.target.closest("a") && contents.matches(":popover-open")) contents.hidePopover();
};
const showCurrent = box => { // `box` is what scrolls: on a phone the contents, else what holds them
  const link = box.querySelector("[aria-current]");
  if (link) box.scrollTop = link.offsetTop - box.clientHeight / 2;
};
contents.ontoggle = () => showCurrent(contents);
const spy = new IntersectionObserver(entries => {
  for (const {target} of entries.filter(entry => entry.isIntersecting)) {
    contents.querySelector("[aria-current]")?.removeAttribute("aria-current");
    contents.querySelector(`[href="#${target.id}"]`).setAttribute("aria-current", "true");
    showCurrent(contents.parentElement);
  }
}, {rootMargin: "-20% 0px -79% 0px"});
document.querySelectorAll("section[id]").forEach(section => spy.observe(section));
document.querySelector("#open").onclick = () => {
  document.querySelectorAll(".diff").forEach(diff => { diff.open = true; });
};
