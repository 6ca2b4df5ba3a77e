#include "bindings/open_channel.h"

#include <chrono>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <utility>

#include "bindings/python.h"
#include "common/loopback.h"
#include "rdma/channel.h"
#include "shm/channel.h"
#include "tcp/channel.h"

namespace py = pybind11;

namespace adaptive {
namespace {

// Reads options by name and knows in the end which nobody asked for.
class Options {
 public:
  explicit Options(const py::dict& given) : given_(given) {}

  template <typename Value>
  void read(const char* name, Value& value) {
    known_.insert(name);
    if (!given_.contains(name) || given_[name].is_none()) {
      return;
    }
    try {
      value = given_[name].cast<Value>();
    } catch (const py::cast_error&) {
      throw py::type_error(std::string(name) + " cannot be " + std::string(py::repr(given_[name])));
    }
  }

  void read_seconds(const char* name, std::chrono::milliseconds& value) {
    double seconds = std::chrono::duration<double>(value).count();
    read(name, seconds);
    if (!(seconds > 0.0 && seconds < 1e8)) {
      throw std::invalid_argument(std::string(name) + " " + std::to_string(seconds) +
                                  " must be above 0 and below 1e8");
    }
    value = std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3) + 1);
  }

  void done(const std::string& kind) const {
    for (const auto& entry : given_) {
      const auto name = entry.first.cast<std::string>();
      if (known_.count(name) == 0) {
        throw py::type_error(kind + " has no option '" + name + "'");
      }
    }
  }

 private:
  const py::dict& given_;
  std::set<std::string> known_;
};

template <typename Chosen>
void read_common(Options& options, Chosen& chosen) {
  options.read("slot_bytes", chosen.slot_bytes);
  options.read("slots", chosen.slots);
  options.read("limit_bytes", chosen.limit_bytes);
}

// Of transports whose memory can be computed into.
template <typename Chosen>
void read_reservable(Options& options, Chosen& chosen) {
  options.read("reservable", chosen.reservable);
}

template <typename Chosen>
void read_more(Options& options, Chosen& chosen) {
  options.read("crc", chosen.crc);
  options.read_seconds("silent_limit_s", chosen.silent_limit);
}

void read_rdma(Options& options, RdmaOptions& chosen) {
  options.read("device", chosen.device);
  options.read("near_pci", chosen.near_pci);
  options.read("port", chosen.port);
  options.read("gid_index", chosen.gid_index);
  options.read("mtu", chosen.mtu_bytes);
  options.read("num_qps", chosen.num_qps);
  options.read("ack_timeout", chosen.ack_timeout);
  options.read("write_bytes", chosen.write_bytes);
}

}  // namespace

std::unique_ptr<Sender> open_channel(const std::string& kind, const Session& session, int peer,
                                     const MakeLink& make_link, const py::dict& given,
                                     const Deadline& deadline) {
  Options options(given);
  if (kind == "loopback") {
    if (peer != session.rank) {
      throw std::invalid_argument("loopback is the channel to oneself, rank " +
                                  std::to_string(session.rank) + ", not to " +
                                  std::to_string(peer));
    }
    LoopbackOptions chosen;
    read_common(options, chosen);
    read_reservable(options, chosen);
    options.done(kind);
    return open_loopback(session, chosen);
  }
  if (peer == session.rank) {
    throw std::invalid_argument("only loopback leads to oneself");
  }
  const auto connect = [&](auto chosen, const auto& open_channel) {
    options.done(kind);
    const Tick tick = [] {
      const py::gil_scoped_acquire acquire;
      run_signal_handlers();
    };
    const py::gil_scoped_release release;
    Link link = make_link(kind == "shm", deadline, tick);
    return open_channel(session, std::move(link), chosen, deadline, tick);
  };
  if (kind == "shm") {
    ShmOptions chosen;
    read_common(options, chosen);
    read_more(options, chosen);
    read_reservable(options, chosen);
    options.read("stream_from_bytes", chosen.stream_from_bytes);
    options.read("cuda_device", chosen.cuda_device);
    options.read("cuda_refusal", chosen.cuda_refusal);
    options.read("cuda_driver", chosen.cuda_driver);
    return connect(chosen, open_shm);
  }
  if (kind == "tcp") {
    TcpOptions chosen;
    read_common(options, chosen);
    read_more(options, chosen);
    return connect(chosen, open_tcp);
  }
  if (kind == "rdma") {
    RdmaOptions chosen;
    read_common(options, chosen);
    read_more(options, chosen);
    read_reservable(options, chosen);
    read_rdma(options, chosen);
    return connect(chosen, open_rdma);
  }
  throw std::invalid_argument("kind '" + kind + "' must be shm, rdma, tcp or loopback");
}

}  // namespace adaptive
