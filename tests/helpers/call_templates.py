"""Short chat templates, each of which writes calls in another format, as the models' own do."""

_CHATML = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}{% set f = call.function %}
CALL{% endfor %}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_HERMES = """<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}
</tool_call>"""

_QWEN_CODER = """<tool_call>
<function={{ f.name }}>
{% for key, value in f.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>"""

_GLM = """<tool_call>{{ f.name }}
{% for key, value in f.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>"""

_LLAMA = """\
{%- for m in messages %}<|start_header_id|>
{{- "ipython" if m.role == "tool" else m.role }}<|end_header_id|>

{% if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
{%- set f = m.tool_calls[0].function -%}
{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}
{%- else %}{{ tools | tojson if tools and loop.first }}{{ m.content }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

_MISTRAL = """\
{%- for m in messages %}
{%- if m.role == "user" %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS][INST]
{{- m.content }}[/INST]
{%- elif m.role == "tool" %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]
{%- elif m.tool_calls %}CALLS</s>
{%- else %}{{ m.content }}</s>{% endif %}{% endfor %}"""

_LIST = """[TOOL_CALLS][
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids of nine letters") }}{% endif %}
{{- (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ ", " if not loop.last }}
{%- endfor %}]"""

_ARGS = """{% for call in m.tool_calls -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}"""

_HARMONY = """\
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary
{{- "<|message|>" }}{{ m.content }}<|end|>
{%- elif m.tool_calls %}{% set f = m.tool_calls[0].function %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>
{%- endif %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>
{{- f.arguments | tojson }}<|call|>
{%- elif m.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>
{{- m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

_DEEPSEEK = """\
{%- for m in messages %}
{%- if m.role == "user" %}<｜User｜>{{ m.content }}
{%- elif m.role == "tool" %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- elif m.role == "assistant" %}<｜Assistant｜>{{ m.content or "" }}
{%- if m.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in m.tool_calls %}{% set f = call.function %}CALL{% endfor %}<｜tool▁calls▁end｜>
{%- endif %}<｜end▁of▁sentence｜>
{%- else %}{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""

_R1 = """{{ "\\n" if not loop.first }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}
```json
{{ f.arguments | tojson }}
```<｜tool▁call▁end｜>"""

_V31 = """{{ "<｜tool▁call▁begin｜>" + f.name + "<｜tool▁sep｜>" + f.arguments }}
{{- "<｜tool▁call▁end｜>" }}"""

_WRITTEN = """\
{%- macro written(value) %}
{%- if value is string %}<|"|>{{ value }}<|"|>
{%- elif value is mapping %}{
{%- for key, item in value.items() %}{{ key }}:{{ written(item) }}{{ "," if not loop.last }}
{%- endfor %}}
{%- elif value is sequence %}[
{%- for item in value %}{{ written(item) }}{{ "," if not loop.last }}{% endfor %}]
{%- else %}{{ value | tojson }}{% endif %}{% endmacro %}"""

_GEMMA = (
    _WRITTEN
    + """
{%- if tools %}<|turn>system
{% for tool in tools %}<|tool>declaration:{{ tool.function.name }}<tool|>{% endfor %}<turn|>
{% endif %}
{%- for m in messages %}<|turn>{{ "model" if m.role == "assistant" else m.role }}
{% if m.tool_calls %}{% for call in m.tool_calls %}<|tool_call>call:{{ call.function.name }}
{{- written(call.function.arguments) }}<tool_call|>{% endfor %}{% endif %}
{%- for result in m.tool_responses or [] %}<|tool_response>response:{{ result.name }}
{{- written(result.response if result.response is mapping else {"value": result.response}) }}
{{- "<tool_response|>" }}{% endfor %}
{{- m.content }}<turn|>
{% endfor %}
{%- if add_generation_prompt %}<|turn>model
{% endif %}"""
)

_SEED = """<seed:tool_call>
<function={{ f.name }}>
{% for key, value in f.arguments.items() %}<parameter={{ key }}>
{{- value if value is string else value | tojson }}</parameter>
{% endfor %}</function>
</seed:tool_call>"""

_INVOKED = """{% for key, value in f.arguments.items() -%}
<PREFIXparameter name="{{ key }}"STRING>{{ value if value is string else value | tojson -}}
</PREFIXparameter>
{% endfor %}"""

_TAGGED = """\
{%- if tools %}{{ tools | tojson }}
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}<result>{{ m.content }}</result>
{% else %}<turn>{{ m.role }}
{{ m.content }}
{%- if m.tool_calls %}
<SECTION>
{% for call in m.tool_calls %}{% set f = call.function -%}
<PREFIXinvoke name="{{ f.name }}">
ARGUMENTS</PREFIXinvoke>
{% endfor %}</SECTION>{% endif %}</turn>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<turn>assistant
{% endif %}""".replace("ARGUMENTS", _INVOKED)

_MINIMAX = (
    _TAGGED.replace("SECTION", "minimax:tool_call").replace("PREFIX", "").replace("STRING", "")
)
_DSML = _TAGGED.replace("PREFIX", "｜DSML｜").replace(
    "STRING", """ string="{{ 'true' if value is string else 'false' }}\""""
)

_IN_LIST = """\
{%- if tools %}{{ tools | tojson }}
{% endif %}
{%- for m in messages %}<turn>{{ m.role }}
{{ m.content }}
{%- if m.tool_calls %}OPENING[
{%- for call in m.tool_calls %}{{ call.function | tojson }}{{ ", " if not loop.last }}
{%- endfor %}]CLOSING{% endif %}</turn>
{% endfor %}
{%- if add_generation_prompt %}<turn>assistant
{% endif %}"""

_COHERE = _IN_LIST.replace(
    "{{ call.function | tojson }}",
    """
    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.function.name }}", "parameters":
    {{- " " }}{{ call.function.arguments | tojson }}}""",
)

_GIGACHAT = """<|function_call|>{{ f | tojson }}"""

_KIMI = """\
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}<|im_user|>{{ m.role }}<|im_middle|>
{%- if m.role == "tool" %}## Return of {{ m.tool_call_id }}
{% endif %}{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{{- call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>
{%- endif %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

_FUNCTION_GEMMA = """{% for m in messages %}<start_of_turn>{{ m.role }}
{% if m.role == "tool" %}<start_function_response>response:{{ m.name }}{value:<escape>
{{- m.content }}<escape>}<end_function_response>{% else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}<start_function_call>call:{{ call.function.name }}
{{- written(call.function.arguments) }}<end_function_call>{% endfor %}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

_FUNCTIONARY = """<function={{ f.name }}>{{ f.arguments | tojson }}</function>"""


def _in_list(opening: str, closing: str, template: str = _IN_LIST) -> str:
    return template.replace("OPENING", opening).replace("CLOSING", closing)


CALL_TEMPLATES = {
    "seed": _CHATML.replace("CALL", _SEED),
    "minimax": _MINIMAX,
    "deepseek_v32": _DSML.replace("SECTION", "｜DSML｜function_calls"),
    "deepseek_v4": _DSML.replace("SECTION", "｜DSML｜tool_calls"),
    "nemotron": _in_list("<TOOLCALL>", "</TOOLCALL>"),
    "apriel": _in_list("<tool_calls>", "</tool_calls>"),
    "granite": _in_list("<|tool_call|>", ""),
    "cohere": _in_list("<|START_ACTION|>", "\n<|END_ACTION|>", _COHERE),
    "gigachat": _CHATML.replace("CALL", _GIGACHAT),
    "kimi": _KIMI,
    "function_gemma": _WRITTEN.replace('<|"|>', "<escape>")
    + "{{ tools | tojson if tools }}\n"
    + _FUNCTION_GEMMA,
    "functionary": _CHATML.replace("CALL", _FUNCTIONARY),
    "hermes": _CHATML.replace("CALL", _HERMES),
    "qwen_coder": _CHATML.replace("CALL", _QWEN_CODER),
    "glm": _CHATML.replace("CALL", _GLM),
    "llama": _LLAMA,
    "mistral": _MISTRAL.replace("CALLS", _LIST),
    "mistral_args": _MISTRAL.replace("CALLS", _ARGS),
    "harmony": _HARMONY,
    "deepseek": _DEEPSEEK.replace("CALL", _R1),
    "deepseek_v31": _DEEPSEEK.replace("CALL", _V31),
    "gemma4": _GEMMA,
}
"""Templates by the names of their formats."""
