// Handing a file descriptor to other processes of the same user through a unix socket.
//
// The name of the socket is the caller's: a filesystem path (created with mode 0600, removed when
// the sender is done) or, with a leading '@', an abstract name, of which nothing can be left behind
// by a crash. Both ends refuse a peer that runs as another user.
#pragma once

#include <functional>
#include <string>

#include "common/deadline.h"
#include "common/scoped_fd.h"

namespace adaptive {

// Called about every 100 ms and after signals while a function below waits; may throw to end it.
using Tick = std::function<void()>;

// Listens at `name` and hands `fd` to `count` peers, each of which confirms its receipt. Keeps no
// copy of fd. Throws DeadlineError, SystemError.
void send_fd(const std::string& name, int fd, int count, const Deadline& deadline,
             const Tick& tick);

// Fetches the descriptor that the process listening at `name` hands out, waiting for that process
// to start listening if need be. Throws DeadlineError, SystemError, and Error for a peer of
// another user or one that speaks something else.
ScopedFd recv_fd(const std::string& name, const Deadline& deadline, const Tick& tick);

}  // namespace adaptive
