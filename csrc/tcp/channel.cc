#include "tcp/channel.h"

#include <string>
#include <utility>

#include "common/error.h"
#include "tcp/connection.h"
#include "tcp/frame.h"

namespace adaptive {
namespace {

class TcpSender final : public Sender {
 public:
  TcpSender(std::string remote, const TcpOptions& options, std::uint64_t peer_limit_bytes,
            std::shared_ptr<tcp::Connection> connection)
      : remote_(std::move(remote)),
        options_(options),
        peer_limit_bytes_(peer_limit_bytes),
        connection_(std::move(connection)) {}

  // A forked child does not have the reactor's thread, and must not affect its parent's
  // connections.
  ~TcpSender() override {
    if (connection_->state().in_maker()) {
      connection_->shut();
    }
  }

  void send(Message message, const void* data, const Keeper& keeper) override {
    const ChannelState& state = connection_->state();
    state.check_process();
    connection_->check();
    state.prepare(message, sequence_, peer_limit_bytes_, options_.crc);
    if (options_.crc) {
      message.crc = crc32c(data, static_cast<std::size_t>(message.nbytes));
    }
    connection_->writer().send(message, data, keeper);
    ++sequence_;
  }

  // Reserving would not save a copy, because the kernel copies all sent data anyway.
  std::optional<Reserved> reserve(std::size_t) override { return std::nullopt; }

  void commit(Message, Reserved) override {
    throw Error("a TCP channel has no memory of its own that could be committed");
  }

  bool flush(const Deadline& deadline) override {
    try {
      return connection_->writer().wait_empty(deadline);
    } catch (const Error&) {
      connection_->check();  // throws the actual cause, if it is known
      throw;
    }
  }

  std::size_t pending() const noexcept override { return connection_->writer().unsent(); }

  void close() noexcept override {
    if (connection_->state().in_maker()) {
      connection_->writer().say_goodbye();
      connection_->pump();
    }
  }

  Info info() const override {
    return {{"kind", std::string("tcp")},
            {"peer_closed", connection_->peer_closed()},
            {"remote", remote_},
            {"slot_bytes", static_cast<std::int64_t>(options_.slot_bytes)},
            {"slots", static_cast<std::int64_t>(options_.slots)}};
  }

 private:
  const std::string remote_;
  const TcpOptions options_;
  const std::uint64_t peer_limit_bytes_;
  const std::shared_ptr<tcp::Connection> connection_;
  std::uint64_t sequence_ = 0;
};

}  // namespace

std::unique_ptr<Sender> open_tcp(const Session& session, Link link, const TcpOptions& options,
                                 const Deadline& deadline, const Tick& tick) {
  check_options(options);
  tcp::Offer mine;
  mine.job = session.job;
  mine.slot_bytes = options.slot_bytes;
  mine.limit_bytes = options.limit_bytes;
  mine.slots = options.slots;
  mine.silent_limit = options.silent_limit;
  link.send_record(tcp::encode_offer(mine), {}, deadline, tick);
  const Link::Record record = link.recv_record(tcp::kOfferBytes, 0, deadline, tick);
  const tcp::Offer theirs = tcp::parse_offer(record.bytes, session.job, link.peer());
  auto connection =
      std::make_shared<tcp::Connection>(session, link.peer(), link.release(), mine, theirs);
  auto sender = std::make_unique<TcpSender>(link.remote(), options, theirs.limit_bytes, connection);
  connection->start();
  return sender;
}

}  // namespace adaptive
