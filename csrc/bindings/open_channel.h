// From a kind and options by name to an open channel.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <string>

#include "common/channel.h"
#include "common/link.h"

namespace adaptive {

// Makes the connection to the peer that a channel starts with; called without the GIL.
using MakeLink = std::function<Link(bool on_this_node, const Deadline&, const Tick&)>;

// Opens the channels of `kind` ("shm", "rdma", "tcp", "loopback") between session.rank and `peer`.
// Needs the GIL, which it gives away while it waits. Throws py::type_error for an option that the
// kind does not have, std::invalid_argument, and what the channels throw.
std::unique_ptr<Sender> open_channel(const std::string& kind, const Session& session, int peer,
                                     const MakeLink& make_link, const pybind11::dict& options,
                                     const Deadline& deadline);

}  // namespace adaptive
