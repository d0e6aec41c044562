// All that the page cannot do without a script: the contents close behind a link and mark where the reader is.
const contents = document.querySelector("#contents");
contents.onclick = event => {
  if (event.target.closest("a") && contents.matches(":popover-open")) contents.hidePopover();
};
const spy = new IntersectionObserver(entries => {
  for (const {target} of entries.filter(entry => entry.isIntersecting)) {
    const link = contents.querySelector(`[href="#${target.id}"]`);
    contents.querySelector("[aria-current]")?.removeAttribute("aria-current");
    link.setAttribute("aria-current", "true");
    contents.scrollTop = link.offsetTop - contents.clientHeight / 2;
  }
}, {rootMargin: "-20% 0px -79% 0px"});
document.querySelectorAll("section[id]").forEach(section => spy.observe(section));
document.querySelector("#open").onclick = () => {
  document.querySelectorAll(".diff").forEach(diff => { diff.open = true; });
};
