// Browsers start no worker for a page that is opened from a disk, so there the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.started = new Promise((done) => {
        frame.onload = () => {
          const inner = frame.contentWindow
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inner.document.createElement("script")
          script.src = new URL(url, location)
          script.onload = () => done(inner)
          inner.document.body.append(script)
        }
      })
      document.body.append(frame)
    }
    postMessage(data) {
      this.started.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
