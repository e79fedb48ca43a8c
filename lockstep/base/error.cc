// SPDX-License-Identifier: Apache-2.0
#include "lockstep/error.h"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/base/text.h"

namespace lockstep {

Error::Error(std::string kind, ErrorText text) : kind_(std::move(kind)), text_(std::move(text)) {
  message_ = "lockstep: " + kind_ + ": " + text_.what;
  for (const auto& [label, part] : {std::pair{"here:   ", &text_.here},
                                    {"peer:   ", &text_.peer},
                                    {"likely: ", &text_.likely},
                                    {"next:   ", &text_.next}})
    if (!part->empty()) message_.append("\n  ").append(label).append(*part);
}

SystemError system_error(const std::string& doing, const std::string& subject) {
  const int code = errno;
  ErrorText text{.what = concat("can't ", doing, " ", subject, ": ", std::strerror(code)), .here = subject};
  rlimit limit{};
  if (code == EMFILE && ::getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    text.likely =
        concat("the limit of ", limit.rlim_cur, " open files (ulimit -n); each world or group of N ranks on one ",
               "machine needs 2 N in each of them, rank 0 and the launcher 3 N");
    text.next =
        concat("raise it, up to ", limit.rlim_max, " without privileges; end groups that are not used any more");
  }
  if (code == ENOMEM && ::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    text.likely = concat("the limit of ", limit.rlim_cur >> 20, " MiB of addresses (ulimit -v)");
    text.next = "raise it, or end groups that are not used any more";
  }
  return SystemError(text);
}

}  // namespace lockstep
