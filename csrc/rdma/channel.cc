#include "rdma/channel.h"

#include "common/error.h"

#ifdef MEGATRON_ADAPTIVE_RDMA

#include <sys/epoll.h>

#include <algorithm>
#include <exception>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/socket_address.h"
#include "rdma/devices.h"
#include "rdma/incoming.h"
#include "rdma/outgoing.h"
#include "rdma/resources.h"
#include "rdma/select.h"
#include "rdma/wire.h"

namespace adaptive {
namespace rdma {
namespace {

// Both directions of a channel with one peer. The completions poll this object.
class Pair : public Source, public std::enable_shared_from_this<Pair> {
 public:
  Pair(const Session& session, std::shared_ptr<ChannelState> channel_state,
       std::shared_ptr<Device> device, const RdmaOptions& options)
      : session_(session),
        channel_state_(std::move(channel_state)),
        device_(std::move(device)),
        incoming_(std::make_shared<Incoming>(channel_state_, device_, options)),
        outgoing_(std::make_shared<Outgoing>(channel_state_, device_, options)) {}

  EndpointRecord describe(unsigned num_lanes) const;
  void connect(const EndpointRecord& peer, const RdmaOptions& options);
  void start(Link link, std::chrono::milliseconds silent_limit);
  void stop() noexcept;

  bool poll(Completions& into) noexcept override;
  void arm() noexcept override;

  ChannelState& channel_state() const noexcept { return *channel_state_; }
  const Device& device() const noexcept { return *device_; }
  Outgoing& outgoing() const noexcept { return *outgoing_; }
  const Incoming& incoming() const noexcept { return *incoming_; }

 private:
  void on_events();
  void on_lost(const std::string& reason);
  void on_left();

  const Session session_;
  std::shared_ptr<ChannelState> channel_state_;
  std::shared_ptr<Device> device_;
  std::shared_ptr<Incoming> incoming_;
  std::shared_ptr<Outgoing> outgoing_;
  std::optional<LinkWatch> watch_;
  bool told_of_leaving_ = false;  // used only by the polling thread
};

EndpointRecord Pair::describe(unsigned num_lanes) const {
  EndpointRecord record;
  record.lanes.resize(num_lanes);
  for (Lane& lane : record.lanes) {
    lane.lid = device_->lid;
    lane.mtu = mtu_code(device_->choice.mtu_bytes);
    lane.link_layer = device_->choice.ethernet ? 2 : 1;
    std::copy_n(device_->gid.raw, lane.gid.size(), lane.gid.begin());
  }
  incoming_->describe(&record);
  outgoing_->describe(&record);
  return record;
}

void Pair::connect(const EndpointRecord& peer, const RdmaOptions& options) {
  incoming_->connect(peer, options.ack_timeout);
  outgoing_->connect(peer, options.ack_timeout);
}

void Pair::start(Link link, std::chrono::milliseconds silent_limit) {
  // The handler keeps a weak pointer, because the reactor must not become the last owner of this
  // object, which owns the reactor.
  session_.reactor->add(
      device_->events->fd, EPOLLIN,
      [weak = weak_from_this()](std::uint32_t) {
        if (const auto self = weak.lock()) {
          self->on_events();
        }
      },
      [weak = weak_from_this()](const std::exception& error) {
        if (const auto self = weak.lock()) {
          self->channel_state_->fail(Failure::Kind::kTransport, error.what());
        }
      });
  incoming_->notify().ask(Notify::Level::kSolicited);
  session_.completions->add(shared_from_this());
  watch_.emplace(
      *session_.reactor, std::move(link), silent_limit,
      [weak = weak_from_this()](const std::string& reason) {
        if (const auto self = weak.lock()) {
          self->on_lost(reason);
        }
      },
      [weak = weak_from_this()] {
        if (const auto self = weak.lock()) {
          self->on_left();
        }
      });
  // Process the messages that arrived before events were requested, because they cause no event.
  session_.completions->drain_sources();
}

// Runs on the reactor's thread.
void Pair::on_events() {
  ibv_cq* queue = nullptr;
  void* ignored = nullptr;
  while (::ibv_get_cq_event(device_->events.get(), &queue, &ignored) == 0) {
    ::ibv_ack_cq_events(queue, 1);
    if (queue == outgoing_->queue()) {
      outgoing_->on_event();
      continue;
    }
    const Notify::Level asked = incoming_->notify().taken(Notify::Level::kSolicited);
    const bool stalled = incoming_->stalled();
    if (stalled) {
      incoming_->notify().ask(Notify::Level::kAll);
    }
    Completions& completions = *session_.completions;
    const bool looks = completions.bell().ring();
    // Solicited messages must be processed even if no thread waits. Some may have arrived before
    // the request, so they cause no event of their own.
    if (!looks || stalled || asked == Notify::Level::kSolicited || incoming_->assembling()) {
      completions.drain_sources();
    }
  }
}

bool Pair::poll(Completions& into) noexcept {
  const bool any = incoming_->poll(into);
  if (any && !told_of_leaving_ && incoming_->peer_gone()) {
    told_of_leaving_ = true;
    outgoing_->peer_left();
  }
  return any;
}

void Pair::arm() noexcept {
  incoming_->notify().ask(Notify::Level::kAll);
  outgoing_->arm();
}

void Pair::on_lost(const std::string& reason) {
  // Messages that the peer sent before it ended are delivered first.
  channel_state_->drain_sources();
  const bool in_order = incoming_->peer_gone() || (incoming_->ended() && outgoing_->finished());
  if (!in_order) {
    channel_state_->fail(Failure::Kind::kPeerLost, reason);
    outgoing_->advance();
  }
}

// Called after the peer's goodbye. The peer's last control word usually arrives earlier. However,
// the peer waits only briefly for its acknowledgement, so on an unreliable network the word may be
// lost together with the queue pair that would repeat it.
void Pair::on_left() {
  channel_state_->drain_sources();
  if (incoming_->peer_gone()) {
    return;
  }
  if (incoming_->ended()) {
    outgoing_->peer_left();
  } else {
    channel_state_->fail(Failure::Kind::kPeerLost, "it left without closing the channel");
    outgoing_->advance();
  }
}

void Pair::stop() noexcept {
  if (!channel_state_->in_maker()) {
    return;
  }
  if (watch_) {
    outgoing_->leave();
    channel_state_->end();
    watch_->say_goodbye();
    session_.completions->remove(this);
    session_.reactor->remove(device_->events->fd);
    watch_.reset();
  }
  outgoing_->stop();
  incoming_->stop();
}

class RdmaSender : public Sender {
 public:
  explicit RdmaSender(std::shared_ptr<Pair> pair) : pair_(std::move(pair)) {}
  RdmaSender(const RdmaSender&) = delete;
  RdmaSender& operator=(const RdmaSender&) = delete;
  ~RdmaSender() override {
    pair_->stop();
    if (!pair_->channel_state().in_maker()) {
      // Leaked, because a forked child must not release the device's resources, which belong to the
      // parent.
      static_cast<void>(new (std::nothrow) std::shared_ptr<Pair>(std::move(pair_)));
    }
  }

  void send(Message message, const void* data, const Keeper& keeper) override {
    outgoing().send(message, data, keeper);
  }
  std::optional<Reserved> reserve(std::size_t nbytes) override {
    return outgoing().reserve(nbytes);
  }
  void commit(Message message, Reserved reserved) override { outgoing().commit(message, reserved); }
  bool flush(const Deadline& deadline) override { return outgoing().flush(deadline); }
  std::size_t pending() const noexcept override { return pair_->outgoing().pending(); }
  void close() noexcept override {
    if (pair_->channel_state().in_maker()) {
      pair_->outgoing().close();
    }
  }
  Info info() const override;

 private:
  // Throws Error in a forked child, because using the queues there would disturb the parent's
  // device.
  Outgoing& outgoing() const {
    pair_->channel_state().check_process();
    return pair_->outgoing();
  }

  std::shared_ptr<Pair> pair_;
};

Info RdmaSender::info() const {
  const PortChoice& choice = pair_->device().choice;
  Info info = pair_->outgoing().info();
  const Arena& received = pair_->incoming().slots();
  info["receive_address"] = static_cast<std::int64_t>(received.address());
  info["receive_bytes"] = static_cast<std::int64_t>(received.size_bytes());
  info["kind"] = std::string("rdma");
  info["peer_closed"] = pair_->incoming().peer_gone();
  info["device"] = choice.device;
  info["port"] = static_cast<std::int64_t>(choice.port);
  info["gid"] = choice.gid;
  info["gid_index"] = static_cast<std::int64_t>(choice.gid_index);
  info["mtu_bytes"] = static_cast<std::int64_t>(choice.mtu_bytes);
  info["why"] = choice.reason;
  return info;
}

void check_options(const RdmaOptions& options) {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) {
      throw std::invalid_argument("an RDMA channel's " + what);
    }
  };
  adaptive::check_options(options);
  require(options.slot_bytes >= 64 && options.slot_bytes <= (std::size_t{1} << 30),
          "slot_bytes must be within 64 and 1 GiB");
  require(options.num_qps >= 1 && options.num_qps <= kMostLanes, "num_qps must be within 1 and 16");
  // The field would allow more, but 31 means 2.4 hours, and 0 means no limit.
  require(options.ack_timeout >= 8 && options.ack_timeout <= 24,
          "ack_timeout must be within 8 (1 ms) and 24 (69 s)");
}

// Returns "10.0.0.3" for "10.0.0.3:4711".
std::string local_address(const Link& link) {
  std::string text = SocketAddress::local_of(link.fd()).text();
  text.resize(std::min(text.size(), text.rfind(':')));
  if (text.size() >= 2 && text.front() == '[' && text.back() == ']') {
    text = text.substr(1, text.size() - 2);
  }
  return text;
}

PortChoice choose(const Link& link, const RdmaOptions& options) {
  Wanted wanted;
  wanted.device = options.device;
  wanted.port = options.port;
  wanted.gid_index = options.gid_index;
  wanted.mtu_bytes = options.mtu_bytes;
  wanted.near_pci = options.near_pci;
  wanted.local_address = local_address(link);
  return choose_port(list_rdma_devices(), wanted);
}

void check_alike(const EndpointRecord& mine, const EndpointRecord& theirs,
                 const ChannelState& channel_state) {
  const auto require = [&](std::uint64_t ours, std::uint64_t other, const std::string& what) {
    if (ours != other) {
      throw Error(channel_state.peer_name() + " opened its RDMA channel with " + what + " " +
                  std::to_string(other) + ", this rank with " + std::to_string(ours) +
                  "; run all ranks with the same options");
    }
  };
  require(mine.job, theirs.job, "job");
  require(mine.slots, theirs.slots, "slots");
  require(mine.slot_bytes, theirs.slot_bytes, "slot_bytes");
  require(mine.stride_bytes, theirs.stride_bytes, "a stride of");
  require(mine.lanes.size(), theirs.lanes.size(), "num_qps");
  if (mine.lanes[0].link_layer != theirs.lanes[0].link_layer) {
    throw Error(channel_state.peer_name() +
                " uses an RDMA port of another kind: one is InfiniBand, the "
                "other Ethernet; choose ports of the same kind with device and port");
  }
}

std::shared_ptr<Pair> build_pair(const Session& session, Link* link, const RdmaOptions& options,
                                 const Deadline& deadline, const Tick& tick) {
  const auto channel_state =
      std::make_shared<ChannelState>(session, link->peer(), "RDMA channel with ");
  auto pair =
      std::make_shared<Pair>(session, channel_state, open_device(choose(*link, options)), options);
  const EndpointRecord mine = pair->describe(options.num_qps);
  link->send_record(encode(mine), {}, deadline, tick);
  const auto answer = link->recv_record(kLargestRecordBytes, 0, deadline, tick);
  const EndpointRecord theirs = decode_endpoint(answer.bytes, channel_state->peer());
  check_alike(mine, theirs, *channel_state);
  pair->connect(theirs, options);
  link->send_record(encode_ready(), {}, deadline, tick);
  decode_ready(link->recv_record(kLargestRecordBytes, 0, deadline, tick).bytes,
               channel_state->peer());
  return pair;
}

}  // namespace
}  // namespace rdma

std::unique_ptr<Sender> open_rdma(const Session& session, Link link, const RdmaOptions& options,
                                  const Deadline& deadline, const Tick& tick) {
  rdma::check_options(options);
  std::shared_ptr<rdma::Pair> pair;
  try {
    pair = rdma::build_pair(session, &link, options, deadline, tick);
  } catch (const std::exception& error) {
    try {
      // Send the error to the peer, which would otherwise wait until the deadline.
      link.send_record(rdma::encode_refusal(error.what()), {},
                       deadline.at_most(std::chrono::seconds(1)), tick);
    } catch (const std::exception&) {
      // The peer has exited too.
    }
    throw;
  }
  auto sender = std::make_unique<rdma::RdmaSender>(pair);
  pair->start(std::move(link), options.silent_limit);
  return sender;
}

}  // namespace adaptive

#else

namespace adaptive {

std::unique_ptr<Sender> open_rdma(const Session&, Link, const RdmaOptions&, const Deadline&,
                                  const Tick&) {
  throw Error(
      "the extension was built without RDMA: install libibverbs-dev and build it again with "
      "MEGATRON_ADAPTIVE_RDMA=1");
}

}  // namespace adaptive

#endif
