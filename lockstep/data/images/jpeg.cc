// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/images/encoded_image.h"

#include <csetjmp>
#include <cstdio>

#include <jpeglib.h>

#include <jerror.h>

#include <algorithm>

#include "lockstep/base/to_size.h"

namespace lockstep {
namespace {

// Progressive files have a few scans; one with more than this is made to cost time.
constexpr int kMostScans = 200;

// libjpeg reports an error by a call that must not return. It jumps back into the function that called libjpeg, which
// throws; between setjmp and the jump that function has no variables with destructors. The message is kept here.
struct ErrorManager {
  jpeg_error_mgr base;
  std::jmp_buf back;
  char message[JMSG_LENGTH_MAX];
};

[[noreturn]] void fail(j_common_ptr info) {
  auto* manager = reinterpret_cast<ErrorManager*>(info->err);
  manager->base.format_message(info, manager->message);
  std::longjmp(manager->back, 1);
}

// Warnings: extra bytes between markers do no harm; any other warning means that pixels are damaged.
void warn(j_common_ptr info, int level) {
  if (level < 0 && info->err->msg_code != JWRN_EXTRANEOUS_DATA) fail(info);
}

void limit_scans(j_common_ptr info) {
  auto* decoder = reinterpret_cast<j_decompress_ptr>(info);
  if (decoder->input_scan_number <= kMostScans) return;
  auto* manager = reinterpret_cast<ErrorManager*>(info->err);
  std::snprintf(manager->message, sizeof manager->message, "more than %d scans", kMostScans);
  std::longjmp(manager->back, 1);
}

// The pixels [begin, end) that the interval touches, and one more on each side for the filter of the resize.
Range touched(double from, double length, int64_t limit) {
  const auto begin = std::clamp<int64_t>(static_cast<int64_t>(std::floor(from)) - 1, 0, limit - 1);
  return {begin, std::clamp<int64_t>(static_cast<int64_t>(std::ceil(from + length)) + 1, begin + 1, limit)};
}

class Decoder {
 public:
  Decoder() {
    info_.err = jpeg_std_error(&errors_.base);
    errors_.base.error_exit = fail;
    errors_.base.emit_message = warn;
    if (setjmp(errors_.back) != 0) throw damaged_image("JPEG", errors_.message);
    jpeg_create_decompress(&info_);
    progress_.progress_monitor = limit_scans;
    info_.progress = &progress_;
  }
  ~Decoder() { jpeg_destroy_decompress(&info_); }
  Decoder& operator=(Decoder&&) = delete;

  ImageShape read_header(ByteView file) {
    if (setjmp(errors_.back) != 0) throw damaged_image("JPEG", errors_.message);
    jpeg_mem_src(&info_, file.data(), file.size());
    jpeg_read_header(&info_, TRUE);
    return {3, info_.image_height, info_.image_width};
  }

  // Starts at `eighths`/8 of the size. Returns the size that comes out.
  ImageShape start(unsigned eighths) {
    if (setjmp(errors_.back) != 0) throw damaged_image("JPEG", errors_.message);
    info_.scale_num = eighths;
    info_.scale_denom = 8;
    const bool four_inks = info_.jpeg_color_space == JCS_CMYK || info_.jpeg_color_space == JCS_YCCK;
    info_.out_color_space = four_inks ? JCS_CMYK : JCS_RGB;
    info_.dct_method = JDCT_ISLOW;
    jpeg_start_decompress(&info_);
    return {info_.output_components, info_.output_height, info_.output_width};
  }

  // Decodes `rows` and at least `columns`: libjpeg widens them to whole blocks, and `columns` becomes what it took.
  void read(const Range& rows, Range& columns, DecodeScratch& into) {
    if (setjmp(errors_.back) != 0) throw damaged_image("JPEG", errors_.message);
    auto left = static_cast<JDIMENSION>(columns.begin);
    auto width = static_cast<JDIMENSION>(columns.size());
    jpeg_crop_scanline(&info_, &left, &width);
    columns = {left, int64_t{left} + width};
    const int64_t row_bytes = columns.size() * info_.output_components;
    into.resize(to_size(rows.size() * row_bytes));
    if (rows.begin > 0) jpeg_skip_scanlines(&info_, static_cast<JDIMENSION>(rows.begin));
    for (int64_t i = 0; i < rows.size(); ++i) {
      JSAMPROW row = into.data() + i * row_bytes;
      if (jpeg_read_scanlines(&info_, &row, 1) != 1) fail(reinterpret_cast<j_common_ptr>(&info_));
    }
  }

  bool inverted_inks() const { return info_.saw_Adobe_marker != FALSE; }

 private:
  jpeg_decompress_struct info_{};
  jpeg_progress_mgr progress_{};
  ErrorManager errors_{};
};

// The smallest of 1/8, 1/4, 1/2 and 1 at which the box is not smaller than the result: the sizes that libjpeg-turbo
// decodes with vector instructions.
unsigned eighths_for(const Placement& placement) {
  if (placement.is_copy()) return 8;
  for (const unsigned eighths : {1U, 2U, 4U}) {
    const double scale = eighths / 8.0;
    if (placement.box.width * scale >= to_double(placement.width) &&
        placement.box.height * scale >= to_double(placement.height))
      return eighths;
  }
  return 8;
}

// CMYK -> RGB in place; Adobe's files hold the inks inverted.
void inks_to_rgb(uint8_t* pixels, int64_t count, bool inverted) {
  const uint8_t* from = pixels;
  for (int64_t i = 0; i < count; ++i, from += 4, pixels += 3) {
    const int black = inverted ? from[3] : 255 - from[3];
    for (int c = 0; c < 3; ++c) pixels[c] = static_cast<uint8_t>((inverted ? from[c] : 255 - from[c]) * black / 255);
  }
}

}  // namespace

ImageShape jpeg_shape(ByteView file) { return Decoder().read_header(file); }

// Scale first (the decoder's inverse DCT makes fewer pixels), then only the rows and columns that the box touches: rows
// above are entropy-decoded but not transformed, rows below are never read. `box` follows in two steps: into pixels of
// the scaled image, then relative to the decoded part.
ImageView decode_jpeg(ByteView file, Placement& placement, DecodeScratch& scratch) {
  Decoder decoder;
  const ImageShape full = decoder.read_header(file);
  const ImageShape scaled = decoder.start(eighths_for(placement));
  const Box before = whole_image(full), after = whole_image(scaled);
  const double x_scale = after.width / before.width, y_scale = after.height / before.height;
  Box& box = placement.box;
  box = {box.left * x_scale, box.top * y_scale, box.width * x_scale, box.height * y_scale};

  Range columns = touched(box.left, box.width, scaled.width);
  const Range rows = touched(box.top, box.height, scaled.height);
  decoder.read(rows, columns, scratch);
  if (scaled.channels == 4) inks_to_rgb(scratch.data(), rows.size() * columns.size(), decoder.inverted_inks());
  box.left -= to_double(columns.begin);
  box.top -= to_double(rows.begin);
  return interleaved(scratch.data(), {3, rows.size(), columns.size()});
}

}  // namespace lockstep
