#include "bench/child.h"

#include <poll.h>

#include "lockstep/base/text.h"
#include "lockstep/deadline.h"
#include "lockstep/error.h"

namespace lockstep::bench {

void require_good_end(const Process& process, const std::string& name, std::chrono::milliseconds longest) {
  const Deadline deadline = Deadline::after(longest);
  pollfd ended{.fd = process.pidfd(), .events = POLLIN, .revents = 0};
  while (!deadline.passed() && ::poll(&ended, 1, static_cast<int>(deadline.left().count())) <= 0) continue;
  const std::optional<ExitStatus> status = process.status();
  if (status && status->exit_code == 0 && status->signal == 0) return;
  throw SystemError(
      {.what = concat(name, status ? " failed" : " did not end in time"), .likely = "its own message is above"});
}

}  // namespace lockstep::bench
